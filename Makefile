# Run `make help` for what there is to do.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
IMAGE ?= ghcr.io/landfall-lb/landfall:$(VERSION)
PROGRAMS := landfall-controller landfall-speaker landfall-proxy landfallctl
LDFLAGS := -s -w -X github.com/landfall-lb/landfall/internal/ops.Version=$(VERSION)
LAB := go run ./e2e/cmd/landfall-lab

# Everything but the end-to-end cases; those that need a kernel of their own use network namespaces and skip without root.
PACKAGES = $(shell go list ./... | grep -v '/landfall/e2e')
NET_PACKAGES = $(shell go list -f '{{range .TestImports}}{{if eq . "github.com/landfall-lb/landfall/internal/nstest"}}{{$$.ImportPath}} {{end}}{{end}}{{range .XTestImports}}{{if eq . "github.com/landfall-lb/landfall/internal/nstest"}}{{$$.ImportPath}} {{end}}{{end}}' ./... | tr ' ' '\n' | sort -u | grep -v '/landfall/e2e')

# Says every few seconds that something slow, which is silent by itself, is at work.
BEAT = ( while sleep 5; do echo "  $(1): $$SECONDS s"; done ) & trap "kill $$!" EXIT

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: $(PROGRAMS:%=bin/%) ## build the four programs into bin/

.PHONY: $(PROGRAMS:%=bin/%)
bin/landfall-controller bin/landfall-speaker bin/landfall-proxy: bin/landfall-%:
	@CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./$*
bin/landfallctl:
	@CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./ctl

.PHONY: test
test: test-unit test-net test-e2e ## run every test; as root, as it makes network namespaces

.PHONY: test-unit
test-unit: ## tests of packages, without a cluster; those that need root skip without it
	@$(call BEAT,preparing); $(LAB) prepare
	@$(call BEAT,testing packages); go test -race -timeout 30m $(PACKAGES)

.PHONY: test-net
test-net: require-root ## only the packages with tests against real kernels, in throw-away network namespaces
	@$(call BEAT,preparing); $(LAB) prepare
	@$(call BEAT,testing against the kernel); go test -race -timeout 30m $(NET_PACKAGES)

.PHONY: test-e2e
test-e2e: require-root ## end-to-end cases in the lab: a real API server, nodes as network namespaces, real clients
	@$(call BEAT,preparing); $(LAB) prepare
	@$(call BEAT,testing in the lab); go test -p 1 -timeout 45m -v ./e2e/...

.PHONY: lint
lint: ## vet, golangci-lint, helm lint, and generated files that are not stale
	go vet ./...
	GOLANGCI_LINT_CACHE="$(CURDIR)/.cache/golangci-lint" "$$($(LAB) tool golangci-lint)" run ./...
	"$$($(LAB) tool helm)" lint --strict charts/landfall

.PHONY: generate
generate: ## deepcopy functions and CRDs from api/
	"$$($(LAB) tool controller-gen)" object crd:maxDescLen=400 paths=./api/... output:crd:dir=charts/landfall/charts/crds/templates output:object:dir=api/v1beta1

.PHONY: image
image: ## build the container image with docker
	docker build --build-arg VERSION=$(VERSION) -t $(IMAGE) .

.PHONY: demo demo-bgp
demo: ## the worked example, told step by step; KEEP=1 leaves its lab up
demo-bgp: ## the same behind two routers that speak BGP
demo demo-bgp: require-root
	@go build -v -o bin/landfall-lab ./e2e/cmd/landfall-lab 2>&1 | { n=0; while IFS= read -r line; do \
		if [[ $$line == *[!a-zA-Z0-9_./-]* ]]; then echo "$$line"; elif (( ++n % 20 == 0 )); then echo "  building the lab: $$n packages"; fi; done; }
	@bin/landfall-lab $@

.PHONY: bench
bench: bench-proxy bench-faults bench-go ## every figure: the better part of an hour, best on a quiet machine

.PHONY: bench-proxy
bench-proxy: require-root ## Landfall's proxy beside kube-proxy, as a table and in bench.json; ARGS="-services 1000" and the like
	@go run ./e2e/bench -json bench.json $(ARGS)

.PHONY: bench-faults
bench-faults: require-root ## the longest time without an answer in faults of nodes; COUNT=50 sets how many
	go test -run '^$$' -bench . -benchtime $(or $(COUNT),10)x -timeout 60m ./e2e

.PHONY: bench-go
bench-go: ## Go benchmarks of plans, diffs, renderers and actors, with allocations
	go test -run '^$$' -bench . -benchmem $(PACKAGES)

.PHONY: require-root
require-root:
	@[ "$$(id -u)" = 0 ] || { echo 'this target makes network namespaces: run it as root (sudo make ...)' >&2; exit 1; }
