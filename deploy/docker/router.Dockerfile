# The router: Python and gRPC, no PyTorch. From the repository's root:
#
#     docker build -f deploy/docker/router.Dockerfile -t lockstep-router .

# Another Python 3.11 on Debian, by its digest: --build-arg PYTHON_IMAGE=...
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE} AS build
# An index of your own: --build-arg PIP_INDEX_URL=https://...
ARG PIP_INDEX_URL
WORKDIR /src
# The venv gets no pip of its own.
ENV PIP_PYTHON=/opt/venv/bin/python
COPY deploy/docker/router.lock ./
RUN python -m venv --without-pip /opt/venv \
    && python -m pip install --no-cache-dir --no-deps --require-hashes -r router.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY router router
RUN python -m pip install --no-index --no-deps --no-build-isolation . \
    && python -m pip uninstall --yes setuptools

FROM ${PYTHON_IMAGE}
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 65532 --user-group --no-create-home --shell /usr/sbin/nologin lockstep
COPY --from=build /opt/venv /opt/venv
# The demo model's tokenizer and chat template, 5 KB, so that the demo needs no volume.
COPY deploy/demo_model/tokenizer.json /opt/demo_model/tokenizer.json
COPY deploy/demo_model/tokenizer_config.json /opt/demo_model/tokenizer_config.json
# Not /tmp: Python takes modules from where it starts, and whoever can write there is it then.
WORKDIR /opt
# The commit: --build-arg REVISION=$(git rev-parse HEAD)
ARG REVISION=unknown
LABEL org.opencontainers.image.title="lockstep-router" \
    org.opencontainers.image.description="Schedules all DP ranks of groups of executors" \
    org.opencontainers.image.version="0.2.0" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.licenses="Apache-2.0"
# By number: Kubernetes cannot tell from a name that it is not root.
USER 65532:65532
EXPOSE 50051
ENTRYPOINT ["/opt/venv/bin/python", "-m", "router"]
