//! Owns the list of served models: their names, those of their adapters, and the longest request of each. The JSON members
//! are those of vLLM's own list.

use std::collections::BTreeMap;

use percent_encoding::percent_decode;
use serde::Serialize;

use super::Refusal;
use super::workers::Workers;
use crate::config::Pool;

const OWNER: &str = "pd-router";

/// A query about the models, by its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AboutModels {
    /// The list of models.
    All,
    /// One model. Its name may hold slashes.
    One(String),
    /// Whether one model is ready.
    Ready(String),
}

impl AboutModels {
    /// Parses a path without its query; none for any other path.
    pub fn read(path: &[u8]) -> Option<Self> {
        let name = path.strip_prefix(b"/v1/models")?;
        if matches!(name, b"" | b"/") {
            return Some(Self::All);
        }
        let name = percent_decode(name.strip_prefix(b"/")?)
            .decode_utf8()
            .ok()?;
        let name = name.strip_suffix('/').unwrap_or(&name);
        Some(match name.strip_suffix("/ready") {
            Some(name) => Self::Ready(name.to_owned()),
            None => Self::One(name.to_owned()),
        })
    }
}

/// A list of models.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Models {
    object: &'static str,
    data: Vec<Model>,
}

/// One name by which requests may ask for a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Model {
    /// The name.
    pub id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// The name that workers use for the model.
    pub root: String,
    /// The base model of an adapter.
    pub parent: Option<String>,
    /// Tokens of a prompt and its answer together that each of its workers takes, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
    permission: [Permission; 1],
}

/// Every caller may query, and change nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Permission {
    id: String,
    object: &'static str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'static str,
    group: Option<()>,
    is_blocking: bool,
}

impl Permission {
    fn of(model: &str) -> Self {
        Self {
            id: format!("modelperm-{model}"),
            object: "model_permission",
            created: 0,
            allow_create_engine: false,
            allow_sampling: true,
            allow_logprobs: true,
            allow_search_indices: false,
            allow_view: true,
            allow_fine_tuning: false,
            organization: "*",
            group: None,
            is_blocking: false,
        }
    }
}

impl Workers {
    pub(super) fn models(&self, pool: &Pool) -> Option<Models> {
        if self.states().states().any(|(key, _)| key.model.is_none()) {
            return None;
        }
        let mut found = BTreeMap::new();
        for name in self.served(pool) {
            found.insert(name.to_owned(), self.model(name, name, None, pool));
        }
        for (name, base) in self.adapters() {
            if found.contains_key(base) {
                let adapter = self.model(name, base, Some(base.to_owned()), pool);
                found.entry(name.to_owned()).or_insert(adapter);
            }
        }
        for (name, root) in self.renamed(pool) {
            let model = self.model(name, root, None, pool);
            found.entry(name.to_owned()).or_insert(model);
        }
        Some(Models {
            object: "list",
            data: found.into_values().collect(),
        })
    }

    pub(super) fn named(&self, name: &str, pool: &Pool) -> Option<Result<Model, Refusal>> {
        let mut known = self.models(pool)?.data.into_iter();
        let found = known.find(|model| model.id == name);
        Some(found.ok_or_else(|| match self.can_serve(name, pool) {
            Err(refusal) => refusal,
            Ok(()) => Refusal::UnknownModel {
                model: name.to_owned(),
            },
        }))
    }

    fn served(&self, pool: &Pool) -> impl Iterator<Item = &str> {
        let absent = pool.prefill_absent();
        let states = self.states().states();
        let ready = states.filter(move |(_, state)| state.can_serve_requests(absent).is_ok());
        ready.filter_map(|(key, _)| key.model.as_deref())
    }

    /// The rewritten names that clients use, each with a served model that it stands for.
    fn renamed<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = (&'a str, &'a str)> {
        pool.model_rewrites.iter().filter_map(|rewrite| {
            let mut targets = rewrite.targets.iter();
            let served = targets.find(|to| self.can_serve(&to.model, pool).is_ok())?;
            Some((rewrite.model.as_deref()?, served.model.as_str()))
        })
    }

    fn model(&self, name: &str, of: &str, parent: Option<String>, pool: &Pool) -> Model {
        let root = match parent {
            Some(_) => name,
            None => of,
        };
        Model {
            id: name.to_owned(),
            object: "model",
            created: 0,
            owned_by: OWNER,
            root: root.to_owned(),
            parent,
            max_model_len: self.longest_of(of, pool),
            permission: [Permission::of(name)],
        }
    }

    /// Tokens that every worker of the model takes, as far as known.
    fn longest_of(&self, model: &str, pool: &Pool) -> Option<u64> {
        let base = self.base_of(model).unwrap_or(model);
        let here = self.fleet().open();
        let here = here.filter(|worker| worker.serves(Some(base)));
        let own = here.filter_map(|worker| worker.capacity.max_model_len.or(pool.max_model_len));
        own.min()
    }
}
