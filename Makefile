# Run `make help` for what there is to do.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ifeq ($(shell command -v go),)
ifneq ($(filter-out help,$(MAKECMDGOALS)),)
$(error there is no go in PATH: install Go 1.26; sudo often drops the PATH, then run: sudo env "PATH=$$PATH" make \
	$(MAKECMDGOALS))
endif
endif

# Programs, tools, linters and end-to-end tests are compiled in one way, so that each package is compiled once for all
# of them, in any folder; for the race detector once more. Versions are stamped by LDFLAGS alone: what Go reads from git
# would make other programs of a tree without it, and fails for root in a user's clone.
USER_GOFLAGS := $(filter-out -trimpath -buildvcs=%,$(shell go env GOFLAGS 2>/dev/null)) -buildvcs=false
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(USER_GOFLAGS) -trimpath)
GIT = git -c safe.directory='*'

# The tag v0.1.0 is version 0.1.0. A tree without a tag is on the way to the version that the chart says.
VERSION := $(or $(VERSION),$(shell $(GIT) describe --tags --match 'v[0-9]*' --dirty 2>/dev/null | sed 's/^v//' | grep . || \
	echo "$$(sed -n 's/^version: //p' charts/landfall/Chart.yaml)-dev$$($(GIT) describe --always --dirty --exclude '*' 2>/dev/null | sed 's|^|.g|')"))
IMAGE ?= ghcr.io/landfall-lb/landfall:$(VERSION)
PROGRAMS := landfall-controller landfall-speaker landfall-proxy landfallctl
LDFLAGS := -s -w -X github.com/landfall-lb/landfall/internal/ops.Version=$(VERSION)
LAB := bin/landfall-lab
CACHE = $(or $(LANDFALL_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/landfall)

# Everything but the end-to-end cases; those that need a kernel of their own use network namespaces and skip without
# root.
PACKAGES = $(shell go list ./... | grep -v '/landfall/e2e')
NET_PACKAGES = $(shell go list -f '{{range .TestImports}}{{if eq . "github.com/landfall-lb/landfall/internal/nstest"}}{{$$.ImportPath}} {{end}}{{end}}{{range .XTestImports}}{{if eq . "github.com/landfall-lb/landfall/internal/nstest"}}{{$$.ImportPath}} {{end}}{{end}}' ./... | tr ' ' '\n' | sort -u | grep -v '/landfall/e2e')

# Builds, and says now and then how far it is; "go build -v" prints a line for each package.
BUILD = go build -v -o $(1) $(2) 2>&1 | { n=0; while IFS= read -r line; do \
	if [[ $$line == *[!a-zA-Z0-9_./-]* ]]; then echo "$$line"; \
	elif (( ++n % 20 == 0 )); then echo "  building $(notdir $(1)): $$n packages"; fi; done; }

# Suites of tests, each a name, variables and arguments of "go test". Labs run side by side, as they wait a lot, but not
# beside a compiler, which would have their clients wait for seconds. "make lint" does the work of vet.
TEST = LANDFALL_PROGRAMS='$(CURDIR)/bin' LANDFALL_HELM="$$($(LAB) tool helm)" \
	LANDFALL_CONTROLLER_GEN="$$($(LAB) tool controller-gen)" bin/landfall-test
UNIT = unit CGO_ENABLED=1 -race -vet=off -count=1 -timeout 30m
NO_RACE = no-race -vet=off -count=1 -run '^(TestScale|TestContract11ASideCutOff|TestACrashIsFound)' ./speaker/members
E2E = e2e -vet=off -count=1 -p 1 -parallel 2 -timeout 75m ./e2e/...

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: $(PROGRAMS:%=bin/%) ## build the four programs into bin/

.PHONY: $(PROGRAMS:%=bin/%) bin/landfall-lab bin/landfall-test bin/landfall-vm
bin/landfall-controller bin/landfall-speaker bin/landfall-proxy: bin/landfall-%:
	@$(call BUILD,$@,-ldflags '$(LDFLAGS)' ./$*)
bin/landfallctl:
	@$(call BUILD,$@,-ldflags '$(LDFLAGS)' ./ctl)
bin/landfall-lab bin/landfall-test bin/landfall-vm: bin/%:
	@$(call BUILD,$@,./e2e/cmd/$*)

.PHONY: prepare
prepare: build bin/landfall-lab bin/landfall-test ## build the programs, and fetch or build what tests need
	@$(LAB) prepare

.PHONY: test
test: require-root prepare ## run every test; as root, as it makes network namespaces
	@$(TEST) --verbose e2e --summary bin/tests.txt --again 8 $(UNIT) $(PACKAGES) -- $(NO_RACE) -- $(E2E)

.PHONY: test-unit
test-unit: prepare ## tests of packages, without a cluster; those that need root skip without it
	@$(TEST) $(UNIT) $(PACKAGES) -- $(NO_RACE)

.PHONY: test-net
test-net: require-root prepare ## only the packages with tests against real kernels, in throw-away network namespaces
	@$(TEST) $(UNIT) $(NET_PACKAGES)

.PHONY: test-e2e
test-e2e: require-root prepare ## end-to-end cases in the lab: a real API server, namespaces as nodes, real clients
	@$(TEST) --verbose e2e $(E2E)

.PHONY: test-vm
test-vm: bin/landfall-lab bin/landfall-vm bin/landfall-proxy bin/landfall-speaker bin/landfallctl ## on Debian's kernel, in qemu: packets, SCTP, IPVS, bonds, VRFs: an hour or more without KVM; ARGS="--only l2"
	@$(LAB) prepare vm
	@bin/landfall-vm --kube-proxy "$$($(LAB) tool kube-proxy)" $(ARGS)

.PHONY: test-long
test-long: prepare ## tests of packages with all their random stories, then make fuzz: two hours or more
	@LANDFALL_LONG=1 $(TEST) $(UNIT) -timeout 4h -count=1 $(PACKAGES) -- $(NO_RACE)
	@$(MAKE) --no-print-directory fuzz

# Each function whose name begins with Fuzz, wherever it is; one that fails leaves what made it fail in testdata/fuzz of
# its package, and the others run.
FUZZTIME ?= 1m
.PHONY: fuzz
fuzz: ## fuzz every decoder, FUZZTIME (1m) each
	@failed=; while read -r folder name; do echo "$$folder: $$name"; \
		go test -run '^$$' -fuzz "^$$name\$$" -fuzztime '$(FUZZTIME)' "$$folder" || failed+=" $$folder:$$name"; \
	done < <(grep -rEo --include='*_test.go' '^func Fuzz\w*' . | sed -E 's|/[^/]*:func | |' | sort); \
	[ -z "$$failed" ] || { echo "these failed:$$failed" >&2; exit 1; }

.PHONY: lint
lint: bin/landfall-lab ## golangci-lint (go vet included), helm lint, and generated files that are not stale
	GOLANGCI_LINT_CACHE="$(CURDIR)/bin/golangci-lint" "$$($(LAB) tool golangci-lint)" run ./...
	"$$($(LAB) tool helm)" lint --strict charts/landfall

.PHONY: generate
generate: bin/landfall-lab ## deepcopy functions and CRDs from api/, the chart's README, docs/reference
	go test ./charts -run TestReadmeListsAllValues -update
	"$$($(LAB) tool controller-gen)" object crd:maxDescLen=400 paths=./api/... output:crd:dir=charts/landfall/charts/crds/templates output:object:dir=api/v1beta1
	go test ./controller ./speaker ./proxy ./ctl ./ctl/explain ./docs -run 'TestReference|TestObjects' -update

# Helm's hooks are left out, as kubectl would run them at once, and so is the gossip key, as it would be in a file.
MANIFEST_VALUES ?= $(wildcard charts/examples/*.yaml)
.PHONY: manifests
manifests: bin/landfall-lab ## the chart as plain manifests, for each file of MANIFEST_VALUES, in bin/manifests
	@mkdir -p bin/manifests
	@for values in $(MANIFEST_VALUES); do out=bin/manifests/$$(basename "$$values"); \
		"$$($(LAB) tool helm)" template landfall charts/landfall --namespace landfall-system --kube-version 1.35.0 \
			--no-hooks --values "$$values" --set speaker.gossip.existingSecret=landfall-gossip >"$$out"; echo "$$out"; done

# Without a daemon: an archive in the OCI image layout, of static programs and files out of Debian's packages
# (BASE=debootstrap is all there is: no base image is pulled). BUILDER=docker, podman or buildah builds the Dockerfile.
ARCHS ?= amd64,arm64
BUILDER ?=
.PHONY: image
image: ## build the container image into bin/landfall-image.tar; BUILDER=docker (podman, buildah) leaves it with docker
ifeq ($(BUILDER),)
	@go run ./e2e/cmd/landfall-image build --arch $(ARCHS) --name $(IMAGE) --version $(VERSION) --output bin/landfall-image.tar
else
	$(BUILDER) build --build-arg VERSION=$(VERSION) -t $(IMAGE) .
endif

.PHONY: release
release: bin/landfall-lab image ## what people download, in dist/: programs, image, chart, plugin, bills of materials, checksums
	@go run ./release --helm "$$($(LAB) tool helm)" --images "$$(echo bin/landfall-image*.{tar,json} | tr ' ' ,)" '$(VERSION)'
	@cat dist/checksums.txt

.PHONY: site test-site
site: ## the documentation as a site in bin/site; needs node 20 or later and npm
	@docs/site/build
test-site: ## build it, and look at it in chromium: links, search, a narrow screen, dark
	@docs/site/build --test

.PHONY: demo demo-bgp
demo: ## the worked example, told step by step; KEEP=1 leaves its lab up
demo-bgp: ## the same behind two routers that speak BGP
demo demo-bgp: require-root bin/landfall-lab
	@$(LAB) $@

.PHONY: cluster
cluster: require-root build bin/landfall-lab ## a cluster of real kubelets, to try Landfall on; KEEP=1, CNI=flannel, ARGS="--story helm"
	@LANDFALL_PROGRAMS='$(CURDIR)/bin' $(LAB) cluster $(ARGS)

SEED ?= 1
MINUTES ?= 10
.PHONY: chaos
chaos: require-root build bin/landfall-lab ## break a lab at random and judge it by the contract; SEED=n MINUTES=m, ARGS="--shrink 10"
	@LANDFALL_PROGRAMS='$(CURDIR)/bin' $(LAB) chaos --seed '$(SEED)' --minutes '$(MINUTES)' \
		--commit "$$($(GIT) describe --always --dirty)" $(ARGS)

.PHONY: soak
soak: require-root build bin/landfall-lab ## churn in a lab for MINUTES=60: memory, goroutines, sockets, rules must stay as they were
	@LANDFALL_PROGRAMS='$(CURDIR)/bin' $(LAB) soak --minutes '$(if $(filter file,$(origin MINUTES)),60,$(MINUTES))' --report bin/soak.json

# Each absence that many times, over ARP and NDP, and over BGP. Routers wait longer than usual for nodes, as they would
# lose some that nothing has happened to where the machine is busy.
RETURNS ?= 50
AWAY ?= 8s
.PHONY: returns
returns: require-root prepare ## nodes go away and come back, and no connection of others may break: hours; RETURNS=50 AWAY=8s MODE=iptables ABSENCE=link
	@$(TEST) --verbose returns returns LANDFALL_RETURNS='$(RETURNS)' LANDFALL_AWAY='$(AWAY)' LANDFALL_BFD=400ms \
		$(if $(ABSENCE),LANDFALL_ABSENCE='$(ABSENCE)') LANDFALL_LAB_PROXY_MODE='$(MODE)' -vet=off -count=1 -timeout 12h \
		-run '^TestContract11AReturningNodeHarmsNobody$$|^TestBGPFaults$$/^(the_pods_move_away|a_node_is_away_and_back)$$' ./e2e

MODE ?= nftables
.PHONY: conformance
conformance: require-root build bin/landfall-lab ## upstream's suite on such a cluster: an hour; MODE=iptables, FOCUS=DNS,Services, SPECS=PATTERN
	@LANDFALL_PROGRAMS='$(CURDIR)/bin' $(LAB) conformance --mode '$(MODE)' --focus '$(FOCUS)' --specs '$(SPECS)' \
		--nodes '$(or $(NODES),3)' --version '$(VERSION)' -- $(ARGS)

REPORT ?= bin/performance.md
.PHONY: bench
bench: require-root ## one report of all figures in bin/performance.md: hours on a quiet machine; COUNT=10, ARGS="-metallb"
	@go run ./e2e/bench -report $(REPORT) -faults $(or $(COUNT),10) -go $(ARGS)

.PHONY: bench-proxy
bench-proxy: require-root ## Landfall's proxy beside kube-proxy in all modes; ARGS="-no-churn -no-load" for the share of a bare node
	@go run ./e2e/bench -report $(REPORT) $(ARGS)

.PHONY: bench-faults
bench-faults: require-root ## the longest time without an answer in faults of nodes; COUNT=50 sets how many
	@go run ./e2e/bench -no-churn -no-load -no-outside -faults $(or $(COUNT),10) $(ARGS)

.PHONY: bench-go
bench-go: ## Go benchmarks of plans, diffs, renderers and actors, with allocations
	go test -run '^$$' -bench . -benchmem $(PACKAGES)

.PHONY: scale
VIPS ?= 21
scale: ## large clusters, simulated: gossip, speakers, a proxy, the API server's watches; NODES=300 VIPS=50 PLANNERS=200
	LANDFALL_SCALE_NODES=$(or $(NODES),100) LANDFALL_SCALE_VIPS=$(VIPS) go test -count=1 -v -timeout 4h \
		-run '^(TestScale|TestStormOfWatches)$$' ./speaker/members ./internal/kube
	LANDFALL_SCALE_NODES=$(or $(PLANNERS),100) LANDFALL_SCALE_VIPS=100 go test -count=1 -v -timeout 4h \
		-run '^TestPlannersAgree$$' ./speaker
	go test -timeout 1h -run '^$$' -bench '^BenchmarkScale$$' -benchtime 1x ./speaker ./proxy
	go test -timeout 1h -run '^$$' -bench '^BenchmarkRelist$$' -benchtime 10x ./internal/kube

.PHONY: require-root
require-root:
	@[ "$$(id -u)" = 0 ] || { echo 'this target makes network namespaces: run it as root (sudo make ...)' >&2; exit 1; }
