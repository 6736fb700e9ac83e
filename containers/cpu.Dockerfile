# megavis on CPUs. From the checkout: docker build --file containers/cpu.Dockerfile --tag megavis:cpu .
FROM python:3.12-slim-bookworm
# DeepSpeed compiles its CPU Adam and its shared-memory all-reduce when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megavis
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY megavis megavis
COPY data_tools data_tools
COPY yaml_configs yaml_configs
COPY launch launch
RUN pip install --no-cache-dir --constraint constraints.txt '.[demo]' \
    && useradd --create-home user
USER 1000
WORKDIR /home/user
ENTRYPOINT ["megavis"]
CMD ["doctor"]
