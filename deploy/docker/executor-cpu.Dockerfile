# An executor on a CPU, with the demo model inside. From the repository's root:
#
#     docker build -f deploy/docker/executor-cpu.Dockerfile -t lockstep-executor-cpu .

# Another Python 3.11 on Debian, by its digest: --build-arg PYTHON_IMAGE=...
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE} AS build
# Versions of system packages go with the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# Indexes of your own: --build-arg PIP_INDEX_URL=https://..., and for PyTorch the other.
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
# The venv gets no pip of its own.
ENV PIP_PYTHON=/opt/venv/bin/python
COPY deploy/docker/executor-cpu.lock deploy/docker/torch-cpu.txt ./
# One index for each step: of two, pip takes the higher version, and anybody may upload to one.
RUN python -m venv --without-pip /opt/venv \
    && python -m pip install --no-cache-dir --no-deps \
        --index-url "$TORCH_INDEX_URL" -r torch-cpu.txt \
    && python -m pip install --no-cache-dir --no-deps --require-hashes -r executor-cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY executor executor
RUN python -m pip install --no-index --no-deps --no-build-isolation .
# For every CPU that the image may run on. Then PyTorch's headers and tests can go: 145 MB.
ENV LOCKSTEP_CPU_KERNELS_CACHE=/opt/cpu_kernels
RUN /opt/venv/bin/python -m executor.model.cpu_kernels amx avx512 avx2 \
    && cd /opt/venv/lib/python3*/site-packages/torch && rm -r include test

FROM ${PYTHON_IMAGE}
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LOCKSTEP_CPU_KERNELS_CACHE=/opt/cpu_kernels
RUN useradd --uid 65532 --user-group --no-create-home --shell /usr/sbin/nologin lockstep
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/cpu_kernels /opt/cpu_kernels
COPY deploy/demo_model /opt/demo_model
# Not /tmp: Python takes modules from where it starts, and whoever can write there is it then.
WORKDIR /opt
# The commit: --build-arg REVISION=$(git rev-parse HEAD)
ARG REVISION=unknown
LABEL org.opencontainers.image.title="lockstep-executor-cpu" \
    org.opencontainers.image.description="Runs the demo model on a CPU, driven by a router" \
    org.opencontainers.image.version="0.2.0" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
EXPOSE 50061
ENTRYPOINT ["/opt/venv/bin/python", "-m", "executor"]
