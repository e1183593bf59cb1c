//! Owns the paths that a pool forwards: the inference paths, and no others. All else that an engine serves (its caches, its
//! weights, its sleep) belongs to its operator.

use percent_encoding::percent_decode;

use super::check::{require, value};
use super::{ConfigError, Pool};

/// Maximum paths of a pool: a longer list is a mistake, and each request would pay for it.
pub(super) const MAX_PATHS: usize = 256;

/// Maximum segments of a path: the paths of engines are far shorter.
const MOST_SEGMENTS: usize = 64;

/// Any one segment: an id.
const ONE: &str = "*";

/// One segment or more: a model's name may hold slashes.
const REST: &str = "/**";

/// Segment under which engines mount an application that answers any path behind it.
const MOUNTED: &[u8] = b"metrics";

/// The inference paths of vLLM, SGLang, TensorRT-LLM and Dynamo, and the version, which shows nothing of the fleet's state.
pub(super) fn default() -> Vec<String> {
    [
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/responses",
        "/v1/responses/*",
        "/v1/responses/*/cancel",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/**",
        "/v1/embeddings",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/generations",
        "/generate",
        "/generate_stream",
        "/inference/v1/generate",
        "/encode",
        "/api/chat",
        "/api/generate",
        "/invocations",
        "/tokenize",
        "/v1/tokenize",
        "/detokenize",
        "/v1/detokenize",
        "/pooling",
        "/classify",
        "/v1/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/version",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// A request's path as an engine's server reads it: without its query, decoded once, without a last slash. None for a text that
/// is no path, or in which another server on the way may read a different path.
fn segments(path: &[u8]) -> Option<Vec<Vec<u8>>> {
    let path = path.split(|byte| *byte == b'?').next()?;
    if path.contains(&b'#') {
        return None;
    }
    let decoded: Vec<u8> = percent_decode(path).collect();
    let path = decoded.strip_suffix(b"/").unwrap_or(&decoded);
    let parts = path.strip_prefix(b"/")?.split(|byte| *byte == b'/');
    let parts: Vec<Vec<u8>> = parts.take(MOST_SEGMENTS + 1).map(<[u8]>::to_vec).collect();
    (parts.len() <= MOST_SEGMENTS && parts.iter().all(|part| is_plain(part))).then_some(parts)
}

/// Whether a segment is a plain name: neither empty nor a step to another directory.
fn is_plain(segment: &[u8]) -> bool {
    let is_step = matches!(segment, b"" | b"." | b"..");
    let is_odd = |byte: &u8| byte.is_ascii_control() || *byte == b'\\';
    !is_step && !segment.iter().any(is_odd)
}

/// The segments of a path before its last ones, which the pattern names; none where the last ones do not match.
fn before<'p>(pattern: &str, path: &'p [Vec<u8>]) -> Option<&'p [Vec<u8>]> {
    let wanted = pattern.split('/').skip(1);
    let count = wanted.clone().count();
    let (before, named) = path.split_at_checked(path.len().checked_sub(count)?)?;
    let fits = |(wanted, got): (&str, &Vec<u8>)| wanted == ONE || wanted.as_bytes() == got;
    wanted.zip(named).all(fits).then_some(before)
}

/// Whether a path matches the pattern, behind any prefix that a route puts before it, as `/openai`.
fn fits(pattern: &str, path: &[Vec<u8>]) -> bool {
    let is_free = |before: &[Vec<u8>]| !before.iter().any(|segment| segment == MOUNTED);
    let ends = |path: &[Vec<u8>]| before(pattern.trim_end_matches(REST), path).is_some_and(is_free);
    match pattern.ends_with(REST) {
        false => ends(path),
        true => (1..path.len()).any(|length| path.get(..length).is_some_and(ends)),
    }
}

impl Pool {
    /// Whether a request with this path, its query included, is forwarded.
    pub fn forwards(&self, path: &[u8]) -> bool {
        let Some(path) = segments(path) else {
            return false;
        };
        self.paths.iter().any(|pattern| fits(pattern, &path))
    }

    pub(super) fn check_paths(&self, at: &str) -> Result<(), ConfigError> {
        require(
            (1..=MAX_PATHS).contains(&self.paths.len()),
            format_args!("{at}.paths"),
            "must list from 1 to 256 paths; leave it out for the engines' inference paths",
        )?;
        match self.paths.iter().position(|path| !is_pattern(path)) {
            None => Ok(()),
            Some(index) => Err(value(
                &format!("{at}.paths[{index}]"),
                "must be a path as \"/v1/responses/*\": a slash before each segment, `*` for any one, `**` as the last for any one or more, neither query nor escapes",
            )),
        }
    }
}

fn is_pattern(pattern: &str) -> bool {
    let Some(segments) = pattern.trim_end_matches(REST).strip_prefix('/') else {
        return false;
    };
    let is_segment = |segment: &str| {
        is_plain(segment.as_bytes())
            && (segment == ONE || !segment.contains(['*', '?', '#', '%', ' ']))
    };
    // A pattern of placeholders alone matches every path.
    segments.split('/').all(is_segment) && segments.split('/').any(|segment| segment != ONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn pool(fields: &str) -> Result<Pool, ConfigError> {
        let document = format!(
            r#"{{"pools":[{{"name":"p","protocol":"nixl","discovery":{{"static":{{"workers":[]}}}}{fields}}}]}}"#
        );
        Config::parse(document.as_bytes()).map(|mut config| config.pools.remove(0))
    }

    #[test]
    fn found_b5_inference_paths_are_forwarded_and_no_others() {
        let pool = pool("").unwrap();
        for path in [
            "/v1/chat/completions",
            "/v1/chat/completions/?x=1",
            "/openai/v1/chat%2Fcompletions",
            "/primary/v1/completions",
            "/v1/responses",
            "/v1/responses/resp_1",
            "/v1/responses/resp_1/cancel",
            "/v1/messages",
            "/v1/models",
            "/v1/models/org/model",
            "/v1/embeddings",
            "/tokenize",
            "/detokenize",
            "/generate",
            "/inference/v1/generate",
            "/score",
            "/v1/rerank",
            "/pooling",
        ] {
            assert!(pool.forwards(path.as_bytes()), "{path}");
        }
        for path in [
            "",
            "/",
            "*",
            "/flush_cache",
            "/flush_cache?x=/generate",
            "/flush_cache#/generate",
            "/flush%5Fcache",
            "/server_info",
            "/get_server_info",
            "/abort_request",
            "/inference/v1/abort_requests",
            "/update_weights_from_disk",
            "/sleep",
            "/wake_up",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/start_profile",
            "/v1/load_lora_adapter",
            "/metrics",
            "/metrics/generate",
            "/prometheus/metrics/v1/models/x",
            "/health",
            "/health_generate",
            "/v1/models/../flush_cache",
            "/v1/models/%2e%2e/%2e%2e/flush_cache",
            "/v1/models/x\\..\\..\\sleep",
            "/v1/models/x%00",
            "/v1//generate",
            "//generate",
            "/v1/responses/a/b",
            "/xgenerate",
            "generate",
        ] {
            assert!(!pool.forwards(path.as_bytes()), "{path}");
        }
        let deep = format!("{}/generate", "/a".repeat(MOST_SEGMENTS));
        assert!(!pool.forwards(deep.as_bytes()));
    }

    #[test]
    fn found_b5_the_list_is_the_pools() {
        let pool = pool(r#","paths":["/mine/*/run","/all/**"]"#).unwrap();
        for path in ["/mine/1/run", "/x/mine/2/run", "/all/of/it"] {
            assert!(pool.forwards(path.as_bytes()), "{path}");
        }
        for path in ["/mine/run", "/mine/1/2/run", "/all", "/v1/chat/completions"] {
            assert!(!pool.forwards(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn found_b5_what_is_no_path_is_refused_by_name() {
        for (paths, wrong) in [
            ("[]", "paths"),
            (r#"["/a","b"]"#, "paths[1]"),
            (r#"["/"]"#, "paths[0]"),
            (r#"["/**"]"#, "paths[0]"),
            (r#"["/*"]"#, "paths[0]"),
            (r#"["/*/**"]"#, "paths[0]"),
            (r#"["/a/**/b"]"#, "paths[0]"),
            (r#"["/a*"]"#, "paths[0]"),
            (r#"["/a?x=1"]"#, "paths[0]"),
            (r#"["/a/../b"]"#, "paths[0]"),
            (r#"["/a/"]"#, "paths[0]"),
        ] {
            let error = pool(&format!(r#","paths":{paths}"#)).unwrap_err();
            let at = format!("pools[0].{wrong}:");
            assert!(error.to_string().starts_with(&at), "{paths}: {error}");
        }
    }
}
