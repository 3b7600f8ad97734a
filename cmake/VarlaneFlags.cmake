# varlane_flags: flags of our own targets only; nothing leaks to those who link
# us.
# SPDX-License-Identifier: Apache-2.0
add_library(varlane_flags INTERFACE)
target_compile_features(varlane_flags INTERFACE cxx_std_20)
target_compile_options(varlane_flags INTERFACE
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wundef
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
  $<$<BOOL:${VARLANE_WARNINGS_AS_ERRORS}>:-Werror>)
target_compile_definitions(varlane_flags INTERFACE
  VARLANE_CHECK_LEVEL=${VARLANE_CHECK_LEVEL})
# -iquote, not -I: "memory/..." is ours, <memory> the standard's.
target_compile_options(varlane_flags INTERFACE
  "SHELL:-iquote ${PROJECT_SOURCE_DIR}")
if(VARLANE_SANITIZE)
  target_compile_options(varlane_flags INTERFACE
    -fsanitize=${VARLANE_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  # Instrumented code compiles twice as fast as at -O2, and the kernels'
  # inlined vectors, once a target, would take minutes a file. Of the directory,
  # so that one below can say otherwise.
  add_compile_options(-O1 -g1)
  # What sanitizers add g++ 14 takes for reads of what was never written or lies
  # outside, in std::regex and std::vector; its manual warns of such warnings.
  target_compile_options(varlane_flags INTERFACE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
    $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds>
    $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overread>)
  if(VARLANE_SANITIZE MATCHES "address")
    # What AddressSanitizer finds as well.
    target_compile_options(varlane_flags INTERFACE
      -fno-sanitize=null,object-size)
  endif()
  target_link_options(varlane_flags INTERFACE -fsanitize=${VARLANE_SANITIZE})
  if(VARLANE_SANITIZE MATCHES "thread")
    # g++ warns that TSan does not model fences; oneTBB's headers use them.
    target_compile_options(varlane_flags INTERFACE
      $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  endif()
endif()
if(VARLANE_FUZZ)
  # Coverage that libFuzzer follows; its main is linked into its programs only.
  target_compile_options(varlane_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
