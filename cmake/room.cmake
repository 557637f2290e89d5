# Warnings, sanitizers and include path of every target here.
add_library(shardmlp_options INTERFACE)
target_include_directories(shardmlp_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(shardmlp_options INTERFACE -Wall -Wextra -Werror)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  target_compile_options(shardmlp_options INTERFACE -Wthread-safety)
endif()
if(SHARDMLP_SANITIZER)
  target_compile_options(shardmlp_options INTERFACE -fsanitize=${SHARDMLP_SANITIZER} -fno-omit-frame-pointer)
  target_link_options(shardmlp_options INTERFACE -fsanitize=${SHARDMLP_SANITIZER})
endif()

# shardmlp_room(NAME SOURCES ... PUBLIC libs ... PRIVATE libs ...): the static library of one room.
function(shardmlp_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ROOM_SOURCES})
  target_link_libraries(${name} PUBLIC shardmlp_options ${ROOM_PUBLIC} PRIVATE ${ROOM_PRIVATE})
endfunction()

# shardmlp_test(NAME SOURCES ... LIBS ...): one test program, run by ctest as a whole.
function(shardmlp_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE shardmlp_options ${TEST_LIBS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  # A spinning OpenMP team fights the service's own threads for the cores.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${TEST_TIMEOUT} ENVIRONMENT "OMP_WAIT_POLICY=passive")
endfunction()
