//! Owns the requests of workers that register themselves: authorisation, the meaning of a body, and the answers.

use std::net::SocketAddr;

use percent_encoding::percent_decode_str;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;

use super::document::WrittenDocument;
use super::{
    Leases, Named, Poll, PollAnswer, Registry, RegistryChange, RegistryError, SourceUpdate,
};
use super::{Source, SourceError};
use crate::config::check_workers;
use crate::config::{ConfigError, Discovery, ListedWorker, Pool, RegistrationDiscovery, Token};
use crate::excerpt::{MESSAGE, NAME, excerpt};

/// Longest request body, in bytes.
pub const MAX_BODY: usize = 1024 * 1024;

/// Scope of a registration, in every answer: a worker behind several gateways must register with each.
const SCOPE: &str = "this gateway only";

/// The source of self-registered workers: polls nothing.
#[derive(Debug)]
pub struct Registration;

impl Source for Registration {
    fn poll(&self) -> Option<Poll> {
        None
    }

    fn read_answer(&mut self, _answer: &PollAnswer<'_>) -> Result<SourceUpdate, SourceError> {
        Err(SourceError::NotAsked)
    }
}

/// The pool that a worker registers with, and its rules.
#[derive(Debug, Clone, Copy)]
pub struct RegistrationPool<'a> {
    /// The pool.
    pub pool: &'a Pool,
    /// Rules of the registration.
    pub rules: &'a RegistrationDiscovery,
}

/// An HTTP answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status.
    pub status: u32,
    /// Headers beside the content type, which is `application/json`.
    pub headers: Vec<(&'static str, &'static str)>,
    /// JSON body.
    pub body: String,
}

/// Why a registration is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// No pool takes registrations, or not the named one.
    #[error("no pool{} takes registrations", name.as_ref().map(|name| format!(" `{name}`")).unwrap_or_default())]
    NoRegistrationPool {
        /// The named pool.
        name: Option<String>,
    },
    /// Several pools take registrations, and none is named.
    #[error("several pools take registrations: name one, as /pd-router/workers?pool=NAME")]
    WhichPool,
    /// No token, or a wrong one.
    #[error("a valid bearer token is required")]
    Unauthorised,
    /// An invalid body.
    #[error("{}{problem}", field.as_ref().map(|field| format!("{field}: ")).unwrap_or_default())]
    Body {
        /// Field in the body; none for the body itself.
        field: Option<String>,
        /// What is wrong.
        problem: String,
    },
    /// The body is too long.
    #[error("the body must be at most {MAX_BODY} bytes")]
    TooLarge,
    /// No more workers fit.
    #[error("{0}")]
    Full(String),
    /// A method other than `GET`, `POST` and `DELETE`.
    #[error("only GET, POST and DELETE are allowed here")]
    Method,
    /// Other threads have always changed the registry first.
    #[error("too many workers register at once; try again")]
    Contended,
}

impl Problem {
    /// The answer, in the shape of OpenAI's errors.
    pub fn reply(&self) -> Reply {
        let (status, code) = match self {
            Self::NoRegistrationPool { .. } => (404, "no_registration"),
            Self::WhichPool => (400, "no_pool"),
            Self::Unauthorised => (401, "unauthorised"),
            Self::Body { .. } => (400, "invalid_field"),
            Self::TooLarge => (413, "body_too_large"),
            Self::Full(_) => (409, "registry_full"),
            Self::Method => (405, "method_not_allowed"),
            Self::Contended => (503, "registry_contended"),
        };
        let param = match self {
            Self::WhichPool => Some("pool"),
            Self::Body { field, .. } => field.as_deref(),
            _ => None,
        };
        let param = param.map(|param| excerpt(param, NAME));
        let headers = match self {
            Self::Unauthorised => vec![("www-authenticate", "Bearer")],
            Self::Method => vec![("allow", "GET, POST, DELETE")],
            Self::Contended => vec![("retry-after", "1")],
            _ => Vec::new(),
        };
        let kind = match status {
            503 => "service_unavailable",
            _ => "invalid_request_error",
        };
        let message = excerpt(self, MESSAGE);
        let body =
            json!({"error": {"message": message, "type": kind, "param": param, "code": code}});
        Reply {
            status,
            headers,
            body: body.to_string(),
        }
    }
}

/// Whether an `authorization` header carries the token. A wrong token takes as long as the right one, whatever its length.
pub fn authorised(header: Option<&[u8]>, token: &Token) -> bool {
    const SCHEME: &[u8] = b"bearer ";
    let Some((scheme, given)) = header.and_then(|header| header.split_at_checked(SCHEME.len()))
    else {
        return false;
    };
    let secret = token.secret();
    let given = given.trim_ascii();
    // Of two lengths `subtle` compares nothing, which would show the secret's.
    let mut padded = given.to_vec();
    padded.resize(secret.len(), 0);
    let is_right = bool::from(padded.ct_eq(secret)) && given.len() == secret.len();
    scheme.eq_ignore_ascii_case(SCHEME) && is_right && !secret.is_empty()
}

/// The registration pool for a request to `path` (with its query), if its `authorization` is valid.
///
/// # Errors
/// [`Problem`] gives the answer.
pub fn registration_pool<'a>(
    pools: impl Iterator<Item = &'a Pool>,
    path: &str,
    authorization: Option<&[u8]>,
) -> Result<RegistrationPool<'a>, Problem> {
    let name = named_pool(path);
    let registration_pools = pools.filter_map(|pool| match &pool.discovery {
        Discovery::Registration(rules) => Some(RegistrationPool { pool, rules }),
        _ => None,
    });
    let mut registration_pools = registration_pools.filter(|registration_pool| {
        name.as_ref()
            .is_none_or(|name| *name == registration_pool.pool.name)
    });
    let (registration_pool, another) = (registration_pools.next(), registration_pools.next());
    let registration_pool = registration_pool.ok_or(Problem::NoRegistrationPool { name })?;
    if another.is_some() {
        return Err(Problem::WhichPool);
    }
    match authorised(authorization, &registration_pool.rules.token) {
        true => Ok(registration_pool),
        false => Err(Problem::Unauthorised),
    }
}

/// The pool named in a path's query.
fn named_pool(path: &str) -> Option<String> {
    let (_, query) = path.split_once('?')?;
    let mut values = query
        .split('&')
        .filter_map(|pair| pair.strip_prefix("pool="));
    let value = percent_decode_str(values.next()?);
    Some(value.decode_utf8_lossy().into_owned())
}

/// Reads the body of a `POST`: a worker, or `{"workers": [...]}` as in a document.
///
/// # Errors
/// [`Problem`] names the field.
pub fn read_put(
    body: &[u8],
    registration_pool: RegistrationPool<'_>,
) -> Result<RegistryChange, Problem> {
    /// Decides between the two forms.
    #[derive(Deserialize)]
    struct Shape {
        workers: Option<IgnoredAny>,
    }
    is_short(body)?;
    // A list would be read as the fields of one worker, in order.
    if body.trim_ascii_start().starts_with(b"[") {
        return Err(Problem::Body {
            field: None,
            problem: "must be a worker, or {\"workers\": [...]}".into(),
        });
    }
    let shape: Shape = read(body)?;
    let (workers, prefix) = match shape.workers {
        Some(_) => (read::<WrittenDocument>(body)?.workers, ""),
        None => (vec![read::<ListedWorker>(body)?], "workers[0]"),
    };
    let field = |path: &str| {
        let path = path.strip_prefix(prefix).unwrap_or(path);
        let path = path.trim_start_matches('.');
        (!path.is_empty()).then(|| path.to_owned())
    };
    check_workers(&workers, registration_pool.pool.protocol, "").map_err(|error| match error {
        ConfigError::Value { path, problem } => Problem::Body {
            field: field(&path),
            problem: problem.to_owned(),
        },
        ConfigError::Document { path, message } => Problem::Body {
            field: field(&path),
            problem: message,
        },
    })?;
    let is_outside = |worker: &ListedWorker| {
        let address = worker.address;
        address.is_some_and(|address| !registration_pool.pool.destinations.allow(address))
    };
    match workers.iter().position(is_outside) {
        Some(index) => Err(Problem::Body {
            field: field(&format!("workers[{index}].address")),
            problem: "lies in none of the networks that this gateway may send requests to".into(),
        }),
        None => Ok(RegistryChange::Put(workers)),
    }
}

/// Reads the body of a `DELETE`: `{"address": …}`, `{"id": …}`, or a list of such, bare or as `{"workers": [...]}`.
///
/// # Errors
/// [`Problem`] names the field.
pub fn read_delete(body: &[u8]) -> Result<RegistryChange, Problem> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Gone {
        address: Option<SocketAddr>,
        id: Option<u64>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Several {
        workers: Vec<Gone>,
    }
    let shape: Value = read(body)?;
    let gone = match &shape {
        Value::Array(_) => read::<Vec<Gone>>(body)?,
        Value::Object(object) if object.contains_key("workers") => read::<Several>(body)?.workers,
        _ => vec![read::<Gone>(body)?],
    };
    let named = gone.iter().map(|gone| match (gone.address, gone.id) {
        (Some(address), None) => Ok(Named::Address(address)),
        (None, Some(id)) => Ok(Named::Id(id)),
        _ => Err(Problem::Body {
            field: None,
            problem: "each worker is named by its address or by its id, as {\"address\": \"10.0.0.1:8000\"}".into(),
        }),
    });
    Ok(RegistryChange::Delete(named.collect::<Result<_, _>>()?))
}

/// Refuses a body that is too long, before it is read.
fn is_short(body: &[u8]) -> Result<(), Problem> {
    match body.len() <= MAX_BODY {
        true => Ok(()),
        false => Err(Problem::TooLarge),
    }
}

/// Reads a body; errors name the field.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    is_short(body)?;
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        Problem::Body {
            field: (path != ".").then_some(path),
            problem: error.inner().to_string(),
        }
    })?;
    json.end().map_err(|error| Problem::Body {
        field: None,
        problem: error.to_string(),
    })?;
    Ok(value)
}

impl From<RegistryError> for Problem {
    fn from(error: RegistryError) -> Self {
        Self::Full(error.to_string())
    }
}

impl RegistrationPool<'_> {
    /// Answer to a registration or renewal of `changed` workers.
    pub fn registered(&self, changed: usize) -> Reply {
        self.good(json!({"registered": changed}))
    }

    /// Answer to a removal of `changed` workers.
    pub fn removed(&self, changed: usize) -> Reply {
        self.good(json!({"removed": changed}))
    }

    /// Lists the registered workers, with the time since this VM saw them register, counted at its `tick` in ticks of
    /// `tick_ms` milliseconds.
    pub fn list(&self, registry: &Registry, leases: &Leases, tick: u64, tick_ms: u64) -> Reply {
        let workers = registry.entries().iter().map(|entry| {
            let age_ms = leases
                .age(entry, tick)
                .map(|age| age.saturating_mul(tick_ms));
            let worker = entry.worker().ok();
            let mut worker = serde_json::to_value(worker).unwrap_or_default();
            if let Some(fields) = worker.as_object_mut() {
                fields.insert("id".to_owned(), entry.id().0.into());
                fields.insert("lease_age_ms".to_owned(), age_ms.into());
            }
            worker
        });
        let workers: Vec<Value> = workers.collect();
        self.good(json!({ "workers": workers }))
    }

    fn good(&self, mut said: Value) -> Reply {
        if let Some(fields) = said.as_object_mut() {
            fields.insert("pool".to_owned(), self.pool.name.clone().into());
            fields.insert("lease_ms".to_owned(), self.rules.lease_ms.into());
            fields.insert("scope".to_owned(), SCOPE.into());
        }
        Reply {
            status: 200,
            headers: Vec::new(),
            body: said.to_string(),
        }
    }
}

#[cfg(test)]
mod tests;
