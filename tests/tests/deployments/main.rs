//! Files that an operator applies: manifests, bootstraps, the image, the dashboard, the alerts.
#![forbid(unsafe_code)]

mod bootstraps;
mod envoy_gateway;
mod files;
mod image;
mod istio;
mod judge;
mod manifests;
mod patches;
mod plain;
mod plugin_configurations;
mod watching;
