# Warnings, sanitizers and include path of every target here.
add_library(shardmlp_options INTERFACE)
target_include_directories(shardmlp_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(shardmlp_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror>)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  # Which loops clang vectorizes is no matter of right or wrong; it complains of `omp simd` ones that it does not.
  target_compile_options(shardmlp_options INTERFACE -Wthread-safety -Wno-pass-failed)
endif()
if(SHARDMLP_SANITIZER)
  # A finding ends the test. The sanitizers' own instrumentation confuses g++'s -Wmaybe-uninitialized.
  target_compile_options(shardmlp_options INTERFACE -fsanitize=${SHARDMLP_SANITIZER} -fno-sanitize-recover=all
                                                    -fno-omit-frame-pointer
                                                    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(shardmlp_options INTERFACE -fsanitize=${SHARDMLP_SANITIZER})
endif()

# What `cmake --build --target shardmlp_tests` and `shardmlp_fuzzers` build.
add_custom_target(shardmlp_tests)
add_custom_target(shardmlp_fuzzers)

# shardmlp_room(NAME SOURCES ... PUBLIC libs ... PRIVATE libs ...): the static library of one room.
function(shardmlp_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ROOM_SOURCES})
  target_link_libraries(${name} PUBLIC shardmlp_options ${ROOM_PUBLIC} PRIVATE ${ROOM_PRIVATE})
endfunction()

# Sets `result` to whether a target of ours links gRPC, itself or through another of ours.
function(shardmlp_links_grpc target result)
  set(${result} FALSE PARENT_SCOPE)
  get_target_property(interface_libraries ${target} INTERFACE_LINK_LIBRARIES)
  get_target_property(libraries ${target} LINK_LIBRARIES)
  foreach(library IN LISTS interface_libraries libraries)
    string(REGEX REPLACE "^\\$<LINK_ONLY:(.*)>$" "\\1" library "${library}")
    set(found FALSE)
    if(library MATCHES "^gRPC::")
      set(found TRUE)
    elseif(NOT library MATCHES "::" AND TARGET "${library}")
      shardmlp_links_grpc(${library} found)
    endif()
    if(found)
      set(${result} TRUE PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# shardmlp_test(NAME SOURCES ... LIBS ... [TIMEOUT seconds]): one test program, run by ctest as a whole. One that links
# gRPC gets the label `grpc`; the tsan preset leaves those out, since Debian's gRPC is not instrumented.
function(shardmlp_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;LIBS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  if(SHARDMLP_SANITIZER)
    math(EXPR TEST_TIMEOUT "${TEST_TIMEOUT} * 4")
  endif()
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE shardmlp_options ${TEST_LIBS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  # A spinning OpenMP team fights the service's own threads for the cores.
  set(environment OMP_WAIT_POLICY=passive)
  shardmlp_links_grpc(${name} links_grpc)
  if(links_grpc)
    set_tests_properties(${name} PROPERTIES LABELS grpc)
  endif()
  if(SHARDMLP_SANITIZER STREQUAL "thread")
    # libgomp's barriers are invisible to tsan too; a team of one has none.
    list(APPEND environment OMP_NUM_THREADS=1 TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp)
    target_link_libraries(${name} PRIVATE shardmlp_tsan_synchronization)
  endif()
  if(SHARDMLP_SANITIZER MATCHES "address")
    list(APPEND environment LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/lsan.supp:print_suppressions=0)
  endif()
  if(NOT (links_grpc AND SHARDMLP_SANITIZER STREQUAL "thread"))
    add_dependencies(shardmlp_tests ${name})
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${TEST_TIMEOUT} ENVIRONMENT "${environment}")
endfunction()

# shardmlp_fuzzer(NAME SOURCES ... LIBS ... [CORPUS folder]): a libFuzzer program, run by ctest for
# SHARDMLP_FUZZ_SECONDS with the label `fuzz`. A crashing input is left in the build folder.
set(SHARDMLP_FUZZ_SECONDS 60 CACHE STRING "How long ctest runs each fuzz target")
function(shardmlp_fuzzer name)
  cmake_parse_arguments(FUZZER "" "CORPUS" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${FUZZER_SOURCES})
  target_link_libraries(${name} PRIVATE shardmlp_options ${FUZZER_LIBS} -fsanitize=fuzzer)
  add_dependencies(shardmlp_fuzzers ${name})
  set(corpus ${CMAKE_CURRENT_BINARY_DIR}/${name}_corpus)
  file(MAKE_DIRECTORY ${corpus})
  add_test(NAME ${name} COMMAND ${name} -max_total_time=${SHARDMLP_FUZZ_SECONDS} -timeout=20 -print_final_stats=1
                                ${corpus} ${FUZZER_CORPUS})
  math(EXPR limit "${SHARDMLP_FUZZ_SECONDS} + 120")
  set_tests_properties(${name} PROPERTIES LABELS fuzz TIMEOUT ${limit} ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()
