# hwy::hwy: its CMake config first, pkg-config second (upstream has a config
# only from 1.0.4; Debian's 1.0.3 ships one).
# SPDX-License-Identifier: Apache-2.0
find_package(hwy QUIET CONFIG)
include(FindPackageHandleStandardArgs)
if(hwy_FOUND AND TARGET hwy::hwy)
  find_package_handle_standard_args(hwy CONFIG_MODE)
else()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(HWY QUIET IMPORTED_TARGET libhwy)
  endif()
  find_package_handle_standard_args(hwy
    REQUIRED_VARS HWY_LINK_LIBRARIES VERSION_VAR HWY_VERSION)
  if(hwy_FOUND AND NOT TARGET hwy::hwy)
    add_library(hwy::hwy INTERFACE IMPORTED)
    set_target_properties(hwy::hwy PROPERTIES
      INTERFACE_LINK_LIBRARIES PkgConfig::HWY)
  endif()
endif()
