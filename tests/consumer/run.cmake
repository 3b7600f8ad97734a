# One consumer test: cmake -D MODE=... -P run.cmake (see CMakeLists.txt).
# SPDX-License-Identifier: Apache-2.0
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${result}): ${command}")
  endif()
endfunction()

set(common -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${COMPILER}
  -D CMAKE_BUILD_TYPE=${BUILD_TYPE})
if(LAUNCHER)
  list(APPEND common -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
endif()
set(consumer ${SOURCE_DIR}/tests/consumer/project)
set(build ${WORK_DIR}/build)

if(MODE STREQUAL "subdirectory")
  if(KIND STREQUAL "shared")
    set(shared ON)
  else()
    set(shared OFF)
  endif()
  run(${CMAKE_COMMAND} -S ${consumer} -B ${build} ${common}
    -D VARLANE_SUBDIRECTORY=${SOURCE_DIR} -D BUILD_SHARED_LIBS=${shared}
    -D VARLANE_INSTALL=ON -D CMAKE_CXX_FLAGS=-DVARLANE_FEWER_TARGETS=2)
  run(${CMAKE_COMMAND} --build ${build} --parallel 2)
  run(${build}/example_service)
  return()
endif()

# A fresh prefix each time: nothing of an older installation can help.
set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${prefix} ${build})
run(${CMAKE_COMMAND} --install ${VARLANE_BUILD_DIR} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${consumer} -B ${build} ${common}
  -D CMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build ${build})
run(${build}/example_service)

# The package that was found must be the one just installed, of this kind.
file(GLOB_RECURSE shared_libraries ${prefix}/libvarlane.so.*)
file(GLOB_RECURSE static_libraries ${prefix}/libvarlane.a)
if(KIND STREQUAL "shared" AND NOT shared_libraries
   OR KIND STREQUAL "static" AND NOT static_libraries)
  message(FATAL_ERROR "no ${KIND} library below ${prefix}")
endif()

# The same program without CMake.
find_program(pkg_config pkg-config REQUIRED)
file(GLOB_RECURSE pc_file ${prefix}/varlane.pc)
cmake_path(GET pc_file PARENT_PATH pc_dir)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})
execute_process(COMMAND ${pkg_config} --cflags --libs varlane
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
cmake_path(GET pc_dir PARENT_PATH library_dir)
run(${COMPILER} -std=c++20 -O1 ${SOURCE_DIR}/docs/example_service.cc ${flags}
  -pthread -Wl,-rpath,${library_dir} -o ${WORK_DIR}/example_pkg_config)
run(${WORK_DIR}/example_pkg_config)
