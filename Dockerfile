# The server in a container, for a CPU by default:
#   docker build -t arimage .
#   docker build -t arimage:cuda --build-arg DEVICE=cuda .
FROM python:3.12-slim AS build
ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/arimage
ENV PATH=/opt/arimage/bin:$PATH
# PyPI's wheels for Linux bring the CUDA libraries. The container needs the driver of the host only.
RUN if [ "$DEVICE" = cuda ]; then index=https://pypi.org/simple; else index=https://download.pytorch.org/whl/cpu; fi \
    && pip install --index-url "$index" "torch>=2.10" "torchvision>=0.25"
COPY . /src
RUN pip install "/src[app,lora,serve,video]" /src/recipes/emoji /src/recipes/icons

FROM python:3.12-slim
ARG DEVICE=cpu
# Triton compiles its launchers with a C compiler at run time.
# hadolint ignore=DL3008
RUN if [ "$DEVICE" = cuda ]; then \
    apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 1000 --create-home arimage && install -d -o 1000 /models
COPY --from=build /opt/arimage /opt/arimage
ENV PATH=/opt/arimage/bin:$PATH HF_HOME=/models
VOLUME /models
USER 1000
WORKDIR /home/arimage
EXPOSE 8000
STOPSIGNAL SIGINT
HEALTHCHECK --start-period=10m --timeout=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["arimage"]
CMD ["serve", "--host", "0.0.0.0"]
