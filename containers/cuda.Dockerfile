# megavis on NVIDIA GPUs. From the checkout: docker build --file containers/cuda.Dockerfile --tag megavis:cuda .
# Run: docker run --gpus all --ipc=host --volume "$PWD:/work" --workdir /work megavis:cuda train CONFIG
# The development image, since DeepSpeed compiles its operators (NVMe) with nvcc on first use.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build python3 python3-dev python3-venv libaio-dev \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
WORKDIR /opt/megavis
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY megavis megavis
COPY data_tools data_tools
COPY yaml_configs yaml_configs
COPY launch launch
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint constraints.txt '.[demo]'
USER 1000
WORKDIR /home/ubuntu
ENTRYPOINT ["megavis"]
CMD ["doctor"]
