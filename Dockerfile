# The gateway as an image. Two stages: the first one makes the environment, the second has neither pip's cache nor the
# lock. Nothing but /data is ever written, so the image runs read-only (docker run --read-only --tmpfs /tmp).

FROM python:3.11-slim-bookworm AS build
COPY requirements.lock .
RUN python -m venv --without-pip /venv \
 && python -m pip --python /venv/bin/python install --disable-pip-version-check --no-cache-dir \
        --require-hashes --only-binary :all: --requirement requirements.lock

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="EZAT Router" \
      org.opencontainers.image.description="A self-hosted LLM gateway" \
      org.opencontainers.image.licenses="MIT"
ENV PATH="/venv/bin:$PATH" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# By number, so that volumes and cluster policies know the user without a look into the image.
RUN groupadd --gid 10001 ezat \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin ezat \
 && install --directory --owner 10001 --group 10001 --mode 0750 /data

# The code belongs to root: the gateway can't change itself.
WORKDIR /app
COPY --from=build /venv /venv
COPY run.py ./
COPY proxy/ proxy/
COPY plugins/ plugins/
COPY config/ config/
RUN python -m compileall -q proxy plugins && chmod -R a+rX .

USER 10001:10001
VOLUME /data
EXPOSE 8787 8788
STOPSIGNAL SIGTERM

# Whether it lives, not whether its store does: to start it anew would mend no store. Below a server.base_path the
# answer is a 404, which is a sign of life, too.
HEALTHCHECK --interval=5s --timeout=4s --start-period=30s --retries=3 \
    CMD ["python", "-I", "-c", "import http.client, os, sys; at = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('EZAT_PORT', '8787')), timeout=3); at.request('GET', '/healthz'); sys.exit(at.getresponse().status >= 500)"]

# The demo, until another configuration is named: docker run IMAGE --config config/container.yaml
ENTRYPOINT ["python", "run.py"]
CMD ["--config", "config/demo-container.yaml"]
