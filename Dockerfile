# One image holds all programs; the chart says which one a container runs.
FROM golang:1.26-bookworm AS build
ARG VERSION=devel
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN make build VERSION="${VERSION}"

# The proxy drives the host's netfilter through the tools of this image, in both dialects.
FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends iptables nftables conntrack \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/bin/ /usr/local/bin/
# Programs are named by the chart; run bare, the image says what it is.
CMD ["landfallctl", "--help"]
