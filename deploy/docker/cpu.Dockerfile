# shardmlp-server and shardmlpctl for CPUs. From the root of the tree:
#
#   docker build --file deploy/docker/cpu.Dockerfile --tag shardmlp-server:0.1.0 .
#
#   --build-arg JOBS=N    compiler processes at a time, 1.5 GiB of memory each; default: one a core

FROM debian:12-slim AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
COPY scripts/lib/apt-packages.txt /src/scripts/lib/
# The versions are the distribution's.
# hadolint ignore=DL3008
RUN apt-get update && \
    awk '$1 == "build" {print $2}' /src/scripts/lib/apt-packages.txt | \
      DEBIAN_FRONTEND=noninteractive xargs apt-get install --yes --no-install-recommends && \
    rm -rf /var/lib/apt/lists/*
COPY . /src
ARG JOBS=
RUN cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHARDMLP_CUDA=OFF -DSHARDMLP_PYTHON=OFF \
      -DSHARDMLP_TESTS=OFF -DSHARDMLP_BENCHMARKS=OFF && \
    cmake --build /build --parallel ${JOBS:-"$(nproc)"} --target shardmlp-server shardmlpctl && \
    install --strip -D --target-directory=/install /build/server/shardmlp-server /build/client/cli/shardmlpctl

FROM debian:12-slim
# hadolint ignore=DL3008
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
      libabsl20220623 libcpp-httplib0.11 libdnnl2 libgloo0 libgomp1 libgrpc++1.51 libopenblas0-pthread \
      libprometheus-cpp-core1.0 libprotobuf32 libspdlog1.10 libxxhash0 && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /install/ /usr/local/bin/
# Threads that wait must not spin on the service's cores. The server sees to that by itself, by starting over.
ENV OMP_WAIT_POLICY=passive
# Of calls, of health for probes that know no TLS, of replicas (rank 0 alone), of Prometheus.
EXPOSE 50051 50052 50050 9464
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/shardmlp-server"]
CMD ["--help"]
