# One image holds all programs; the chart names the program of each container. "make image" builds the same without a
# daemon.
FROM --platform=$BUILDPLATFORM golang:1.26-bookworm AS build
ARG VERSION=devel
ARG TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN rm -rf bin && GOARCH="${TARGETARCH}" make build VERSION="${VERSION}"
# What the proxy runs in iptables mode: the tools of iptables out of Debian's packages, and what they need.
RUN go run ./e2e/cmd/landfall-image root --arch "${TARGETARCH}" --output /image

FROM scratch
ARG VERSION=devel
LABEL org.opencontainers.image.title="Landfall" \
      org.opencontainers.image.description="Load balancer and service proxy for bare-metal Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/landfall-lb/landfall" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /image/ /
COPY --from=build /src/bin/ /usr/local/bin/
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# What needs root on a node says so in its pod: see the chart.
USER 65532:65532
# Without a program of the chart's, the image prints the help of landfallctl.
CMD ["landfallctl", "--help"]
