# hwloc::hwloc through pkg-config; hwloc ships no CMake config.
# SPDX-License-Identifier: Apache-2.0
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(HWLOC QUIET IMPORTED_TARGET hwloc)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(hwloc
  REQUIRED_VARS HWLOC_LINK_LIBRARIES VERSION_VAR HWLOC_VERSION)
if(hwloc_FOUND AND NOT TARGET hwloc::hwloc)
  add_library(hwloc::hwloc INTERFACE IMPORTED)
  set_target_properties(hwloc::hwloc PROPERTIES
    INTERFACE_LINK_LIBRARIES PkgConfig::HWLOC)
endif()
