# Whether the CUDA backend and NCCL's replica group can be built, and what they are made of. CUDA 12 and 13.
set(SHARDMLP_CUDA_FOUND FALSE)
set(SHARDMLP_NCCL_FOUND FALSE)
if(SHARDMLP_CUDA)
  include(CheckLanguage)
  find_package(CUDAToolkit 12 QUIET)
  check_language(CUDA)
  if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER)
    # Code for each generation, and the last one's in a form that later ones translate.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
      else()
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
      endif()
    endif()
    enable_language(CUDA)
    # Formulas are constexpr, which is how host and device share them.
    set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} --expt-relaxed-constexpr -Werror all-warnings")
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 knows no later one than 17 of nvcc's
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    # Debian's packages name /usr/include, which has to be left where a compiler looks for it by itself.
    list(APPEND CMAKE_CUDA_IMPLICIT_INCLUDE_DIRECTORIES ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})
    set(SHARDMLP_CUDA_FOUND TRUE)
  endif()
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(SHARDMLP_CUDA_FOUND AND NCCL_INCLUDE_DIR)
    set(SHARDMLP_NCCL_FOUND TRUE)
  endif()
  message(STATUS "CUDA backend: ${SHARDMLP_CUDA_FOUND} ${CUDAToolkit_VERSION}, NCCL: ${SHARDMLP_NCCL_FOUND}")
endif()

# The .cu files hold kernels and launchers alone. Each is compiled by nvcc, and as C++ for the tests' emulation.
set(SHARDMLP_CUDA_KERNELS activation.cu copy.cu reductions.cu update.cu)
set(SHARDMLP_CUDA_SOURCES cublas_matmul.cc cuda_backend.cc cuda_memory.cc cuda_status.cc ${SHARDMLP_CUDA_KERNELS})
list(TRANSFORM SHARDMLP_CUDA_KERNELS PREPEND ${PROJECT_SOURCE_DIR}/kernels/cuda/)
list(TRANSFORM SHARDMLP_CUDA_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/kernels/cuda/)
