# docker build -t radixrt .                         for CPUs
# docker build -t radixrt:cuda --target cuda .      for NVIDIA GPUs; with FlashInfer's kernels, which otherwise are compiled
#                                                   at the first start: --build-arg KERNELS='MODEL --cuda-arch-list 9.0a'
# docker run --rm --network host radixrt            serves nano at http://localhost:8000

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY radixrt radixrt
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# The compiler of this image is for kernels that FlashInfer and Triton compile at the first start. torch's wheels bring
# the libraries of the same CUDA version.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/radixrt
ENV PATH=/opt/radixrt/bin:$PATH
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "radixrt[cuda] @ file://$(echo /wheels/radixrt-*.whl)"
ARG KERNELS=""
RUN test -z "$KERNELS" || FLASHINFER_WORKSPACE_BASE=/tmp/kernels radixrt build-kernels --aot $KERNELS && rm -rf /tmp/kernels
RUN useradd --uid 10001 --create-home radixrt && install --directory --owner radixrt /home/radixrt/.cache
USER 10001
WORKDIR /home/radixrt
EXPOSE 8000 5555
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["radixrt"]
CMD ["serve", "nano"]

# The last stage is what is built by default.
FROM python:3.12-slim AS cpu
RUN pip install --no-cache-dir 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "radixrt[grammar] @ file://$(echo /wheels/radixrt-*.whl)"
RUN useradd --uid 10001 --create-home radixrt && install --directory --owner radixrt /home/radixrt/.cache
USER 10001
WORKDIR /home/radixrt
EXPOSE 8000 5555
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["radixrt"]
CMD ["serve", "nano"]
