# quantkit with an engine that serves what it writes: llama.cpp on a CPU, vLLM on a GPU.
#
#     docker build -t quantkit .
#     docker run --rm -v models:/models quantkit gguf Qwen/Qwen3-0.6B
#
# With CUDA. vLLM compiles kernels, and the larger base image has a compiler:
#
#     docker build -t quantkit:cuda --build-arg PYTHON=3.12 --build-arg TORCH=cu130 --build-arg EXTRAS=vllm .
#     docker run --rm --gpus all -v models:/models quantkit:cuda gptq Qwen/Qwen3-0.6B

# Tag of the image python.
ARG PYTHON=3.12-slim
FROM python:${PYTHON}

# Build of torch: cpu, or a version of CUDA such as cu130.
ARG TORCH=cpu
# Extras of quantkit, separated by commas: llamacpp, vllm, serve, tasks.
ARG EXTRAS=llamacpp

WORKDIR /opt/quantkit
COPY pyproject.toml README.md LICENSE ./
COPY quantkit quantkit
COPY recipes recipes
COPY calibration calibration
COPY heldout heldout
# Downloads are kept in a cache of the builder, outside the image. The package is this folder, so it has no version.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --extra-index-url "https://download.pytorch.org/whl/${TORCH}" ".[${EXTRAS}]"

# Models, and what is downloaded, are kept in the volume.
RUN useradd --create-home --uid 1000 quantkit && mkdir /models && chown quantkit:quantkit /models
USER 1000:1000
ENV HF_HOME=/models/.cache
WORKDIR /models
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["quantkit"]
CMD ["--help"]
