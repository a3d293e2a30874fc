# An image that trains on an NVIDIA GPU: docker build -t draftcore . && docker run --gpus all draftcore list-plugins
# Untested: it was never built; its line of pip ran on Debian with Python 3.11, without a GPU. Of torch it installs what the
# index has for Linux, which is a CUDA build of GB; the driver is the host's. Its Mooncake is the build without CUDA.
FROM python:3.12-slim

# A compiler for torch.compile (Triton), and what Mooncake's wheel links.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libibverbs1 && rm -rf /var/lib/apt/lists/*

WORKDIR /draftcore
COPY . .
RUN pip install --no-cache-dir -r requirements/all.txt

WORKDIR /work
ENTRYPOINT ["draftcore"]
