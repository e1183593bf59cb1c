//! Owns the routes: which one a request takes, and what the plugin sees of it.

use std::collections::BTreeMap;
use std::sync::Arc;

/// A route's cluster and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The cluster.
    pub cluster: String,
    /// The route's name, which is also the `pool` in its metadata under `pd_router`; `None`: it has neither.
    pub pool: Option<String>,
}

/// All routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    by_authority: BTreeMap<String, Arc<Route>>,
    others: Arc<Route>,
}

impl Routes {
    /// One route for every request, except as [`Routes::add`] changes.
    pub fn all(route: Route) -> Self {
        Self {
            by_authority: BTreeMap::new(),
            others: Arc::new(route),
        }
    }

    /// Adds a route for requests to this authority. `false`: the authority already has one.
    pub fn add(&mut self, authority: &str, route: Route) -> bool {
        let authority = authority.to_ascii_lowercase();
        self.by_authority
            .insert(authority, Arc::new(route))
            .is_none()
    }

    /// The route of a request to this authority, whose port is ignored.
    pub fn of(&self, authority: &[u8]) -> &Arc<Route> {
        let authority = String::from_utf8_lossy(authority).to_ascii_lowercase();
        let own = self.by_authority.get(without_port(&authority));
        own.unwrap_or(&self.others)
    }

    /// The routes with an authority of their own.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Route)> {
        let named = self.by_authority.iter();
        named.map(|(authority, route)| (authority.as_str(), route.as_ref()))
    }

    /// The route of all other requests.
    pub fn others(&self) -> &Route {
        &self.others
    }
}

fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(pool: &str) -> Route {
        Route {
            cluster: format!("{pool}-decode"),
            pool: Some(pool.to_owned()),
        }
    }

    #[test]
    fn an_authority_leads_to_its_route_whatever_its_port_and_case() {
        let mut routes = Routes::all(route("one"));
        assert!(routes.add("B.test", route("two")));
        assert!(!routes.add("b.test", route("three")));
        let mut routes = Routes::all(route("one"));
        routes.add("b.test", route("two"));
        for (authority, pool) in [
            ("b.test", "two"),
            ("B.TEST:8080", "two"),
            ("a.test", "one"),
            ("127.0.0.1:8080", "one"),
            ("", "one"),
            ("[::1]:80", "one"),
        ] {
            let found = routes.of(authority.as_bytes());
            assert_eq!(found.pool.as_deref(), Some(pool), "{authority}");
        }
    }
}
