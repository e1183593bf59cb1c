# The only commands a person needs to remember. Each does its own set-up, under target/, once.
.DEFAULT_GOAL := help
.PHONY: help run test soak engines gpu-check bench plugin image reference lint

# For `make run`:
PROXY ?= wasmtime
LISTEN ?= 127.0.0.1:8080
ADMIN ?= 127.0.0.1:9901
CONCURRENCY ?= 2
CONFIG ?=
MEMBER ?=
ENGINES ?=
export PROXY LISTEN ADMIN CONCURRENCY CONFIG MEMBER ENGINES

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "make run PROXY=envoy        real Envoy in the place of the wasmtime host"
	@echo "make run CONFIG=file.json   the fleet that this plugin configuration names, instead of a simulated one"
	@echo "make run ENGINES=vllm       a prefill and a decode engine of a real vLLM, on the CPU, instead of simulated ones"
	@echo "make run CONCURRENCY=4 LISTEN=127.0.0.1:8081 ADMIN=127.0.0.1:9902"
	@echo "make bench ROUTING=1        only what a decision costs (DYNAMO=0: without Dynamo's); PROXIES=1: only the other half"

run: ## Start a gateway in front of a simulated fleet, and say how to try it
	@scripts/run.sh

test: ## Everything that a change must pass
	@scripts/test.sh unit e2e engines fuzz

soak: ## The long versions: ten million lives of requests, the end-to-end tests, all tests in front of a real vLLM, and ten minutes of each fuzz target
	@PD_SOAK=1 scripts/test.sh lives e2e engines fuzz

engines: ## The gateway in front of a real vLLM that runs on the CPU: all tests, where `make test` runs a short part
	@PD_ENGINES=all scripts/test.sh engines

gpu-check: ## The gateway in front of a real engine in PyTorch, on a GPU where there is one (PYTHON=one that has PyTorch)
	@scripts/gpu.sh

bench: ## Envoy with pd-router beside other routers, under load (QUICK=1: a minute of it), then what a routing decision costs beside Dynamo's
	@scripts/bench.sh

plugin: ## Build target/pd_router.wasm
	@scripts/plugin.sh

image: ## Write target/image: the plugin as an OCI image, for gateways that fetch it from a registry
	@scripts/image.sh

reference: ## Write the configuration's JSON Schema and its reference's tables anew, from the types
	@scripts/reference.sh

lint: ## Formatting, clippy, scripts, licences
	@scripts/lint.sh
