# An executor on NVIDIA GPUs: PyTorch, FlashInfer, and the CUDA compiler that FlashInfer calls for
# kernels that it does not bring along. From the repository's root:
#
#     docker build -f deploy/docker/executor.Dockerfile -t lockstep-executor .

# Another image with CUDA's compiler, by its digest: --build-arg CUDA_IMAGE=...
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${CUDA_IMAGE}
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# Versions of system packages go with the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 65532 --user-group --no-create-home --shell /usr/sbin/nologin lockstep \
    && install --directory --owner=lockstep --group=lockstep /cache
# An index of your own: --build-arg PIP_INDEX_URL=https://...
ARG PIP_INDEX_URL
WORKDIR /src
COPY deploy/docker/executor.lock ./
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes -r executor.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY executor executor
RUN /opt/venv/bin/pip install --no-index --no-deps --no-build-isolation .
# Where FlashInfer keeps compiled kernels: mount a volume there, as the root is read-only. A new
# volume of Docker's takes over the folder's owner.
ENV FLASHINFER_WORKSPACE_BASE=/cache
# Not /tmp: Python takes modules from where it starts, and whoever can write there is it then.
WORKDIR /opt
# The commit: --build-arg REVISION=$(git rev-parse HEAD)
ARG REVISION=unknown
LABEL org.opencontainers.image.title="lockstep-executor" \
    org.opencontainers.image.description="Runs one model on one GPU, driven by a router" \
    org.opencontainers.image.version="0.2.0" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
EXPOSE 50061
ENTRYPOINT ["/opt/venv/bin/python", "-m", "executor"]
