# One image holds all programs; the chart names the program of each container.
FROM golang:1.26-bookworm AS build
ARG VERSION=devel
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN make build VERSION="${VERSION}"

# The proxy runs the tools of iptables in iptables mode; nft and conntrack are for people who look around.
FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends iptables nftables conntrack \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/bin/ /usr/local/bin/
# The chart names the program of each container. Without one, the image prints the help of landfallctl.
CMD ["landfallctl", "--help"]
