# NVIDIA's image 26.03: PyTorch 2.11 as NVIDIA builds it, CUDA 13.2, Transformer Engine. Written where no image
# could be fetched, so it has not been built yet.
# $ docker build -t fp8gpt .
# $ docker run --gpus=all --ipc=host -v "$PWD:/work" fp8gpt python diagnose.py
FROM nvcr.io/nvidia/pytorch:26.03-py3
COPY requirements.txt /tmp/
# without torch: to pip the image's is a pre-release, which it would replace
RUN grep -v '^torch' /tmp/requirements.txt > /tmp/others.txt && pip install --no-cache-dir -r /tmp/others.txt
WORKDIR /work
