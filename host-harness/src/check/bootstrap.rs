//! Owns the search for the filter in an Envoy bootstrap, and the reading of its configuration.

use serde_json::Value;

use super::node::Node;

/// A bootstrap.
pub struct Bootstrap {
    document: Value,
}

/// Why a bootstrap has nothing to check.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapReadError {
    /// Neither YAML nor JSON.
    #[error("neither YAML nor JSON: {0}")]
    Text(#[from] serde_yaml_ng::Error),
    /// No filter in it.
    #[error(
        "static_resources.listeners: none has an HTTP connection manager with pd-router in its http_filters: a Wasm filter whose config.root_id is \"pd_router\", or whose configuration has pools"
    )]
    NoFilter,
    /// The filter's configuration cannot be read here.
    #[error(
        "{0}: must be a StringValue whose value is the plugin's configuration, or a Struct that is it; or name the configuration's file"
    )]
    NoConfiguration(String),
}

/// One occurrence of the filter in a listener.
pub struct FilterOccurrence<'a> {
    /// The listener.
    pub listener: Node<'a>,
    /// Its HTTP connection manager.
    pub manager: Node<'a>,
    /// Envoy's configuration of the filter (`PluginConfig`).
    pub plugin: Node<'a>,
}

impl Bootstrap {
    /// Parses a bootstrap.
    ///
    /// # Errors
    /// When the text is neither YAML nor JSON.
    pub fn parse(text: &[u8]) -> Result<Self, BootstrapReadError> {
        // JSON is a subset of YAML.
        Ok(Self {
            document: serde_yaml_ng::from_slice(text)?,
        })
    }

    /// The root of the document.
    pub fn root(&self) -> Node<'_> {
        Node::root(&self.document)
    }

    /// Every occurrence of the filter.
    ///
    /// # Errors
    /// When there is none.
    pub fn gateways(&self) -> Result<Vec<FilterOccurrence<'_>>, BootstrapReadError> {
        let listeners = self.root().at("static_resources.listeners").items();
        let gateways: Vec<_> = listeners.iter().flat_map(in_listener).collect();
        match gateways.is_empty() {
            true => Err(BootstrapReadError::NoFilter),
            false => Ok(gateways),
        }
    }
}

fn in_listener<'a>(listener: &Node<'a>) -> Vec<FilterOccurrence<'a>> {
    let mut chains = listener.field("filter_chains").items();
    chains.push(listener.field("default_filter_chain"));
    let managers = chains
        .iter()
        .flat_map(|chain| chain.field("filters").items())
        .map(|filter| filter.field("typed_config"))
        .filter(|config| config.is_a("HttpConnectionManager"));
    let in_manager = |manager: Node<'a>| {
        let filters = manager.field("http_filters").items();
        let plugins = filters
            .into_iter()
            .map(|filter| filter.field("typed_config"))
            .filter(|config| config.is_a("Wasm"))
            .map(|config| config.field("config"))
            .filter(is_ours);
        let gateway = |plugin| FilterOccurrence {
            listener: listener.clone(),
            manager: manager.clone(),
            plugin,
        };
        plugins.map(gateway).collect::<Vec<_>>()
    };
    managers.flat_map(in_manager).collect()
}

/// Whether a Wasm filter is pd-router.
fn is_ours(plugin: &Node<'_>) -> bool {
    if plugin.field("root_id").text() == Some("pd_router") {
        return true;
    }
    let document = document(plugin).and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    document.is_some_and(|document| document.get("pools").is_some())
}

fn document(plugin: &Node<'_>) -> Option<Vec<u8>> {
    let configuration = plugin.field("configuration");
    match configuration.field("value").value() {
        Value::String(text) => Some(text.clone().into_bytes()),
        Value::Object(fields) => serde_json::to_vec(fields).ok(),
        _ => None,
    }
}

impl FilterOccurrence<'_> {
    /// Path of its configuration.
    pub fn place(&self) -> String {
        self.plugin.at("configuration.value").path().to_owned()
    }

    /// The plugin's configuration.
    ///
    /// # Errors
    /// When there is no readable configuration.
    pub fn configuration(&self) -> Result<Vec<u8>, BootstrapReadError> {
        document(&self.plugin).ok_or_else(|| BootstrapReadError::NoConfiguration(self.place()))
    }
}
