//! Owns the output of a ready gateway: a page for people, a line for programs.

use std::fmt::Write;
use std::net::SocketAddr;

use routing::fleet::Role;
use serde_json::json;

use super::Proxy;
use super::fleet::Members;
use super::gateway::Addresses;

/// Contents of the report.
pub struct Report<'a> {
    proxy: Proxy,
    addresses: Addresses,
    members: &'a Members,
}

impl<'a> Report<'a> {
    /// A report of a ready gateway.
    pub fn new(proxy: Proxy, addresses: Addresses, members: &'a Members) -> Self {
        Self {
            proxy,
            addresses,
            members,
        }
    }

    /// One line of JSON.
    pub fn for_machines(&self) -> String {
        let engines: Vec<_> = self
            .members
            .engines
            .iter()
            .map(|(role, address)| json!({"role": role.name(), "address": address}))
            .collect();
        let line = json!({
            "ready": true,
            "proxy": self.proxy.name(),
            "listen": self.addresses.listen,
            "admin": self.addresses.admin,
            "engines": engines,
        });
        format!("{line}\n")
    }

    /// Addresses, and example requests.
    pub fn for_people(&self) -> String {
        let Addresses { listen, admin } = self.addresses;
        let carrier = match self.proxy {
            Proxy::Wasmtime => "the wasmtime host",
            Proxy::Envoy => "Envoy",
        };
        let mut page = format!("\npd-router is ready, in {carrier}.\n\n");
        let mut line = |name: &str, value: String| {
            let _ = writeln!(page, "  {name:10} {value}");
        };
        line("gateway", format!("http://{listen}"));
        line(
            "status",
            match self.members.status {
                true => format!("http://{listen}/pd-router/status"),
                false => "off; the configuration turns it on with \"status\": true".to_owned(),
            },
        );
        line("metrics", format!("http://{admin}/stats/prometheus"));
        for role in Role::ALL {
            let of_role = self.members.engines.iter().filter(|(its, _)| *its == role);
            let addresses: Vec<_> = of_role.map(|(_, address)| *address).collect();
            if !addresses.is_empty() {
                line(role.name(), listed(&addresses));
            }
        }
        if !self.members.frontends.is_empty() {
            line("frontends", listed(&self.members.frontends));
        }
        let model = self.members.model.as_deref().unwrap_or("MODEL");
        let _ = write!(
            page,
            "\nTry it:\n\n{}\nand as a stream:\n\n{}\nCtrl-C ends it.\n",
            curl(listen, model, "-i", ""),
            curl(listen, model, "-iN", r#", "stream": true"#),
        );
        page
    }
}

fn listed(addresses: &[SocketAddr]) -> String {
    let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
    texts.join(", ")
}

fn curl(listen: SocketAddr, model: &str, options: &str, more: &str) -> String {
    format!(
        "  curl {options} http://{listen}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": \"{model}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hello\"}}], \"max_tokens\": 16{more}}}'\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn members() -> Members {
        Members {
            clusters: BTreeMap::new(),
            routes: crate::host::routes::Routes::default(),
            engines: vec![
                (Role::Prefill, SocketAddr::from(([127, 0, 0, 1], 3))),
                (Role::Decode, SocketAddr::from(([127, 0, 0, 1], 4))),
            ],
            frontends: Vec::new(),
            callers: super::super::bootstrap::Callers::Untrusted,
            status: true,
            model: Some("sim".to_owned()),
        }
    }

    fn addresses() -> Addresses {
        Addresses {
            listen: SocketAddr::from(([127, 0, 0, 1], 1)),
            admin: SocketAddr::from(([127, 0, 0, 1], 2)),
        }
    }

    #[test]
    fn a_program_reads_one_line() {
        let members = members();
        let text = Report::new(Proxy::Envoy, addresses(), &members).for_machines();
        assert_eq!(text.matches('\n').count(), 1);
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            line,
            json!({"ready": true, "proxy": "envoy", "listen": "127.0.0.1:1", "admin": "127.0.0.1:2", "engines": [
                {"role": "prefill", "address": "127.0.0.1:3"}, {"role": "decode", "address": "127.0.0.1:4"}]})
        );
    }

    #[test]
    fn a_person_is_told_what_to_try() {
        let members = members();
        let page = Report::new(Proxy::Wasmtime, addresses(), &members).for_people();
        for part in [
            "http://127.0.0.1:1/pd-router/status",
            "\"stream\": true",
            "\"model\": \"sim\"",
            "127.0.0.1:4",
        ] {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
    }
}
