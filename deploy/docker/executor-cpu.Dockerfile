# An executor on a CPU, with the demo model inside. From the repository's root:
#
#     docker build -f deploy/docker/executor-cpu.Dockerfile -t lockstep-executor-cpu .

FROM python:3.12-slim AS build
WORKDIR /src
COPY deploy/docker/executor-cpu.lock deploy/docker/torch-cpu.txt ./
# One index for each step: of two, pip takes the higher version, and anybody may upload to one.
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps \
        --index-url https://download.pytorch.org/whl/cpu -r torch-cpu.txt \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes -r executor-cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY executor executor
RUN /opt/venv/bin/pip install --no-index --no-deps --no-build-isolation .

FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 65532 --user-group --no-create-home --shell /usr/sbin/nologin lockstep
COPY --from=build /opt/venv /opt/venv
COPY deploy/demo_model /opt/demo_model
# Not /tmp: Python takes modules from where it starts, and whoever can write there is it then.
WORKDIR /opt
USER 65532:65532
EXPOSE 50061
ENTRYPOINT ["/opt/venv/bin/python", "-m", "executor"]
