# An image whose command is evalengine. On a machine with NVIDIA GPUs: docker build --build-arg TORCH_BACKEND=cu130 .
# docs/clusters.md shows its use.
FROM python:3.12-slim
# uv's name of the PyTorch build: cpu has no CUDA in it.
ARG TORCH_BACKEND=cpu
# What the manifests of runs say of the code: .git is not copied.
ARG COMMIT=
# Triton compiles what launches its kernels with the machine's C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "uv>=0.8"
COPY . /opt/evalengine
RUN uv pip install --system --no-cache --torch-backend="$TORCH_BACKEND" torch==2.13.0 '/opt/evalengine[ray]' \
    && useradd --create-home --uid 1000 evalengine \
    && install -d -o evalengine /work
ENV EVALENGINE_COMMIT=$COMMIT
USER 1000
WORKDIR /work
ENTRYPOINT ["evalengine"]
