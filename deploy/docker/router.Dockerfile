# The router: Python and gRPC, no PyTorch. From the repository's root:
#
#     docker build -f deploy/docker/router.Dockerfile -t lockstep-router .

FROM python:3.12-slim AS build
# An index of your own: --build-arg PIP_INDEX_URL=https://...
ARG PIP_INDEX_URL
WORKDIR /src
COPY deploy/docker/router.lock ./
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes -r router.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY router router
RUN /opt/venv/bin/pip install --no-index --no-deps --no-build-isolation .

FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 65532 --user-group --no-create-home --shell /usr/sbin/nologin lockstep
COPY --from=build /opt/venv /opt/venv
# The demo model's tokenizer, 5 KB, so that the demo needs no volume.
COPY deploy/demo_model/tokenizer.json /opt/demo_model/tokenizer.json
# Not /tmp: Python takes modules from where it starts, and whoever can write there is it then.
WORKDIR /opt
LABEL org.opencontainers.image.title="lockstep-router" \
    org.opencontainers.image.description="Schedules all DP ranks of groups of executors" \
    org.opencontainers.image.version="0.2.0" \
    org.opencontainers.image.licenses="Apache-2.0"
# By number: Kubernetes cannot tell from a name that it is not root.
USER 65532:65532
EXPOSE 50051
ENTRYPOINT ["/opt/venv/bin/python", "-m", "router"]
