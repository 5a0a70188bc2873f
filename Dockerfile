# raysim in an image: `docker build -t raysim .` for CPUs, `docker build --build-arg TORCH=cu128 -t raysim:cuda .` for NVIDIA
# GPUs. `mkdir -p -m 777 runs && docker run --rm -v $PWD/runs:/home/raysim/runs raysim run runtime=inprocess tracking=none`
# trains the default study; a folder that docker makes belongs to root, and the image's user may not write there.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY raysim raysim
COPY conf conf
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# cpu, or cu and the version of CUDA that the driver supports; the image needs no CUDA of its own, PyTorch brings it.
ARG TORCH=cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/${TORCH} \
    && pip install --no-cache-dir "$(ls /wheels/*.whl)[sweep]" \
    && rm -rf /wheels \
    && useradd --create-home raysim
USER raysim
WORKDIR /home/raysim
ENV RAYSIM_CACHE=/home/raysim/cache \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["raysim"]
CMD ["-h"]
