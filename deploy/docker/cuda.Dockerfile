# shardmlp-server and shardmlpctl for NVIDIA GPUs, and CPUs where there is none. From the root of the tree:
#
#   docker build --file deploy/docker/cuda.Dockerfile --tag shardmlp-server:0.1.0-cuda .
#
#   --build-arg JOBS=N    compiler processes at a time, 1.5 GiB of memory each; default: one a core
#   --build-arg CUDA=N-M  of NVIDIA's packages; the driver of the machines has to be of this version or a later one
#   --build-arg NCCL=...  the Python package that ships NCCL for it

FROM debian:12-slim AS cuda
# NVIDIA's packages for Debian 12, and the key that they are signed with.
ADD https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb \
    /tmp/cuda-keyring.deb
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ca-certificates && \
    dpkg --install /tmp/cuda-keyring.deb && \
    rm -rf /var/lib/apt/lists/* /tmp/cuda-keyring.deb

FROM cuda AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG CUDA=12-8
COPY scripts/lib/apt-packages.txt /src/scripts/lib/
# The versions are the distributions'.
# hadolint ignore=DL3008
RUN apt-get update && \
    awk '$1 == "build" {print $2}' /src/scripts/lib/apt-packages.txt | \
      DEBIAN_FRONTEND=noninteractive xargs apt-get install --yes --no-install-recommends \
        "cuda-nvcc-${CUDA}" "cuda-cudart-dev-${CUDA}" "libcublas-dev-${CUDA}" && \
    rm -rf /var/lib/apt/lists/*
ARG NCCL=nvidia-nccl-cu12==2.32.3
RUN python3 -m venv /venv && \
    /venv/bin/pip install --no-cache-dir --no-deps "${NCCL}" && \
    mv /venv/lib/python3*/site-packages/nvidia/nccl /nccl
COPY . /src
ARG JOBS=
RUN PATH=$(echo /usr/local/cuda-*/bin):$PATH && export PATH && \
    cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHARDMLP_CUDA=ON -DSHARDMLP_PYTHON=OFF \
      -DSHARDMLP_TESTS=OFF -DSHARDMLP_BENCHMARKS=OFF -DNCCL_INCLUDE_DIR=/nccl/include | tee /tmp/configure.log && \
    grep --quiet "CUDA backend: TRUE .* NCCL: TRUE" /tmp/configure.log && \
    cmake --build /build --parallel ${JOBS:-"$(nproc)"} --target shardmlp-server shardmlpctl && \
    install --strip -D --target-directory=/install /build/server/shardmlp-server /build/client/cli/shardmlpctl

FROM cuda
ARG CUDA=12-8
# hadolint ignore=DL3008
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
      libabsl20220623 libcpp-httplib0.11 libdnnl2 libgloo0 libgomp1 libgrpc++1.51 libopenblas0-pthread \
      libprometheus-cpp-core1.0 libprotobuf32 libspdlog1.10 libxxhash0 \
      "libcublas-${CUDA}" && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /nccl/lib/libnccl.so.2 /usr/local/lib/
RUN ldconfig
COPY --from=build /install/ /usr/local/bin/
# Threads that wait must not spin on the service's cores. The server sees to that by itself, by starting over.
ENV OMP_WAIT_POLICY=passive
# What the container runtime puts in: the GPUs, and the driver's part of CUDA.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Of calls, of health for probes that know no TLS, of replicas (rank 0 alone), of Prometheus.
EXPOSE 50051 50052 50050 9464
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/shardmlp-server"]
CMD ["--help"]
