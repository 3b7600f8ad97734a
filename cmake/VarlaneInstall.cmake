# Install rules: library, headers, CMake package and pkg-config file.
# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

set(VARLANE_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/varlane)

install(TARGETS varlane EXPORT varlaneTargets FILE_SET HEADERS)
install(EXPORT varlaneTargets NAMESPACE varlane::
  DESTINATION ${VARLANE_CMAKE_DIR})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/varlaneConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/varlaneConfig.cmake
  INSTALL_DESTINATION ${VARLANE_CMAKE_DIR})
# Until 1.0 a minor version may change the API.
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/cmake/varlaneConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
# The Find modules go along: consumers of the static library need them to
# resolve what it links.
install(FILES
  ${PROJECT_BINARY_DIR}/cmake/varlaneConfig.cmake
  ${PROJECT_BINARY_DIR}/cmake/varlaneConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/Findhwloc.cmake
  ${PROJECT_SOURCE_DIR}/cmake/Findhwy.cmake
  DESTINATION ${VARLANE_CMAKE_DIR})

# A static library's dependencies are everybody's; a shared one keeps its own.
if(BUILD_SHARED_LIBS)
  set(VARLANE_PC_REQUIRES_FIELD Requires.private)
else()
  set(VARLANE_PC_REQUIRES_FIELD Requires)
endif()
# Paths relative to the file itself, so that the prefix can be moved.
file(RELATIVE_PATH VARLANE_PC_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/varlane.pc.in
  ${PROJECT_BINARY_DIR}/cmake/varlane.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/varlane.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
