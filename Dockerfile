# vLLM's own image with fp8plan; its entry point is still `vllm serve`.
FROM vllm/vllm-openai:v0.33.0
WORKDIR /opt/fp8plan
COPY . .
RUN uv pip install --system --no-cache . && fp8plan profiles
