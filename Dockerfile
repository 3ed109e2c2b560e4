# syntax=docker/dockerfile:1
# Two images from one file, with the same Python and the same Ray, as one cluster needs them:
#   docker build --target cpu  -t stepahead:cpu  .
#   docker build --target cuda -t stepahead:cuda .
ARG PYTHON=3.12.11-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/stepahead
ENV PATH=/opt/stepahead/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# The dependencies alone, so that a change of the code leaves this layer and the next as they are.
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install -c constraints.txt --index-url "${TORCH_INDEX}" torch \
    && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM build AS build-cuda
# PyPI's torch brings CUDA's libraries with it; the driver comes from the node.
RUN pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM python:${PYTHON} AS run
# wget: the health check, and KubeRay's probes of older Rays. tini: reaps what Ray's processes leave.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home ray \
    && mkdir /models /app \
    && chown ray:ray /models /app
ENV PATH=/opt/stepahead/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0 \
    HF_HOME=/models/huggingface \
    STEPAHEAD_CACHE=/models/stepahead
WORKDIR /app
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=12s --start-period=10m --retries=3 \
    CMD ["wget", "--quiet", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "-g", "--"]
# serve_config.yaml, listening on all addresses of the container.
CMD ["sh", "-c", "python -m cluster serve-config > /tmp/serve_config.yaml && exec serve run /tmp/serve_config.yaml"]

FROM run AS cpu
COPY --from=build-cpu /opt/stepahead /opt/stepahead
USER 1000:1000

FROM run AS cuda
# Triton compiles a launcher in C for each kernel.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/stepahead /opt/stepahead
USER 1000:1000
