//! The dashboard and the alerts: valid, and with metrics of `docs/metrics.md` only.

use std::collections::{BTreeMap, BTreeSet};

use promql_parser::label::Matchers;
use promql_parser::parser::{self, Expr, LabelModifier, VectorSelector};
use serde_json::Value;

use crate::files::{document, read};

const DASHBOARD: &str = "envoy/dashboard/pd-router.json";
const ALERTS: &str = "envoy/dashboard/alerts.yaml";

/// Labels that Prometheus adds to every series.
const COLLECTED: [&str; 2] = ["job", "instance"];

/// A metric's row on the page.
struct Metric {
    kind: String,
    labels: BTreeSet<String>,
}

/// The table of `docs/metrics.md`.
fn documented() -> BTreeMap<String, Metric> {
    let page = read("docs/metrics.md");
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `pd_router_"));
    let quoted = |cell: &str| -> BTreeSet<String> {
        let words = cell.split('`').skip(1).step_by(2);
        words.map(str::to_owned).collect()
    };
    let metric = |row: &str| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = format!("pd_router_{}", cells[0].trim_end_matches('`'));
        let metric = Metric {
            kind: cells[1].to_owned(),
            labels: quoted(cells[2]),
        };
        (name, metric)
    };
    rows.map(metric).collect()
}

/// The metric of a series, and its possible labels.
fn labels_of(series: &str, known: &BTreeMap<String, Metric>) -> Option<BTreeSet<String>> {
    if let Some(metric) = known.get(series) {
        let plain = metric.kind != "histogram";
        return plain.then(|| metric.labels.clone());
    }
    let parts = ["_bucket", "_sum", "_count"].into_iter();
    let mut whole = parts.filter_map(|part| Some((part, series.strip_suffix(part)?)));
    let (part, name) = whole.next()?;
    let metric = known
        .get(name)
        .filter(|metric| metric.kind == "histogram")?;
    let mut labels = metric.labels.clone();
    if part == "_bucket" {
        labels.insert("le".to_owned());
    }
    Some(labels)
}

/// Grafana replaces its variables before it sends a query.
fn parsed(expression: &str) -> Expr {
    let text = expression
        .replace("$__rate_interval", "5m")
        .replace("$job", ".*")
        .replace("$instance", ".*")
        .replace("$pool", ".*");
    assert!(!text.contains('$'), "{expression}: an unknown variable");
    parser::parse(&text).unwrap_or_else(|error| panic!("{expression}: {error}"))
}

/// Series and labels that an expression uses.
#[derive(Default)]
struct ExpressionParts {
    /// Each series, with the labels of its selector.
    selectors: Vec<(String, Vec<String>)>,
    /// Labels by which results are grouped or matched.
    grouped: BTreeSet<String>,
}

impl ExpressionParts {
    fn of(expression: &str) -> Self {
        let mut parts = Self::default();
        parts.visit(&parsed(expression));
        parts
    }

    fn visit(&mut self, expression: &Expr) {
        match expression {
            Expr::VectorSelector(selector) => self.selector(selector),
            Expr::MatrixSelector(matrix) => self.selector(&matrix.vs),
            Expr::Aggregate(aggregate) => {
                self.modifier(aggregate.modifier.as_ref());
                self.visit(&aggregate.expr);
            }
            Expr::Binary(binary) => {
                let matching = binary.modifier.as_ref();
                self.modifier(matching.and_then(|modifier| modifier.matching.as_ref()));
                self.visit(&binary.lhs);
                self.visit(&binary.rhs);
            }
            Expr::Call(call) => call.args.args.iter().for_each(|given| self.visit(given)),
            Expr::Paren(within) => self.visit(&within.expr),
            Expr::Subquery(within) => self.visit(&within.expr),
            Expr::Unary(within) => self.visit(&within.expr),
            Expr::NumberLiteral(_) | Expr::StringLiteral(_) => {}
            Expr::Extension(_) => panic!("an extension is no PromQL"),
        }
    }

    fn selector(&mut self, selector: &VectorSelector) {
        let name = selector
            .name
            .clone()
            .expect("every selector names a metric");
        let labels = named(&selector.matchers);
        self.selectors.push((name, labels));
    }

    fn modifier(&mut self, modifier: Option<&LabelModifier>) {
        if let Some(LabelModifier::Include(labels) | LabelModifier::Exclude(labels)) = modifier {
            self.grouped.extend(labels.labels.iter().cloned());
        }
    }
}

fn named(matchers: &Matchers) -> Vec<String> {
    let of = matchers.matchers.iter().map(|matcher| matcher.name.clone());
    of.collect()
}

/// Every series is of a metric of the page, and every label one of that metric's.
fn is_documented(title: &str, expression: &str, known: &BTreeMap<String, Metric>) -> Vec<String> {
    let parts = ExpressionParts::of(expression);
    assert!(!parts.selectors.is_empty(), "{title}: {expression}");
    let mut available: BTreeSet<String> = COLLECTED.map(str::to_owned).into();
    for (series, labels) in &parts.selectors {
        let documented = labels_of(series, known)
            .unwrap_or_else(|| panic!("{title}: docs/metrics.md has no {series}"));
        for label in labels {
            let has = documented.contains(label) || COLLECTED.contains(&label.as_str());
            assert!(has, "{title}: {series} has no label {label}");
        }
        available.extend(documented);
    }
    for label in &parts.grouped {
        assert!(
            available.contains(label),
            "{title}: nothing has the label {label}"
        );
    }
    parts
        .selectors
        .into_iter()
        .map(|(series, _)| series)
        .collect()
}

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).expect("the dashboard is JSON");
    dashboard["panels"].as_array().cloned().unwrap_or_default()
}

/// Titles and expressions of all panels.
fn targets() -> Vec<(String, String)> {
    let panels = panels();
    let all = panels.iter().flat_map(|panel| {
        let title = panel["title"].as_str().unwrap_or("?").to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets.into_iter().map(move |target| {
            let expression = target["expr"].as_str().unwrap_or_default().to_owned();
            (title.clone(), expression)
        })
    });
    all.collect()
}

#[test]
fn the_dashboard_speaks_of_documented_metrics_and_of_all_of_them() {
    let known = documented();
    assert!(
        known.len() > 35,
        "only {} metrics are documented",
        known.len()
    );
    let mut shown = BTreeSet::new();
    for (title, expression) in targets() {
        shown.extend(is_documented(&title, &expression, &known));
    }
    for (name, metric) in &known {
        let series = match metric.kind.as_str() {
            "histogram" => format!("{name}_bucket"),
            _ => name.clone(),
        };
        assert!(shown.contains(&series), "no panel shows {name}");
    }
}

#[test]
fn the_dashboards_panels_lie_side_by_side() {
    let panels = panels();
    let mut ids = BTreeSet::new();
    let mut taken = BTreeMap::new();
    for panel in &panels {
        let title = panel["title"].as_str().unwrap_or("?");
        assert!(
            ids.insert(panel["id"].as_u64()),
            "{title}: its id is another's"
        );
        let at = |side: &str| {
            panel["gridPos"][side]
                .as_u64()
                .expect("a place has four numbers")
        };
        assert!(at("x") + at("w") <= 24, "{title} is too wide");
        for (x, y) in (at("x")..at("x") + at("w"))
            .flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y)))
        {
            let other = taken.insert((x, y), title);
            assert_eq!(other, None, "{title} lies over another one");
        }
    }
    let rows = panels.iter().filter(|panel| panel["type"] == "row");
    assert_eq!(rows.count(), 9);
}

#[test]
fn the_dashboard_asks_whichever_prometheus_is_chosen() {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).expect("the dashboard is JSON");
    let variables = dashboard["templating"]["list"]
        .as_array()
        .expect("it has variables");
    let source = variables
        .iter()
        .find(|variable| variable["type"] == "datasource");
    let source = source.expect("one of them is the data source");
    assert_eq!(source["query"], "prometheus");
    for panel in panels().iter().filter(|panel| panel["type"] != "row") {
        assert_eq!(panel["datasource"]["uid"], "${datasource}");
        assert!(
            panel["description"].is_string(),
            "{} says nothing",
            panel["title"]
        );
    }
    let known = documented();
    for variable in variables
        .iter()
        .filter(|variable| variable["type"] == "query")
    {
        let query = variable["definition"].as_str().unwrap_or_default();
        let within = query
            .strip_prefix("label_values(")
            .and_then(|query| query.rsplit_once(','));
        let (selector, label) = within.expect("a variable lists the values of a label");
        let series = is_documented(query, selector, &known);
        let label = label.trim().trim_end_matches(')');
        let has = COLLECTED.contains(&label) || known[&series[0]].labels.contains(label);
        assert!(has, "{query}");
    }
}

#[test]
fn the_alerts_fit_their_schema_and_speak_of_documented_metrics() {
    let rules = document(ALERTS);
    let schema = document("tests/fixtures/schemas/prometheus.yaml");
    let schema = jsonschema::draft202012::new(&schema).expect("the schema is one");
    let errors: Vec<String> = schema
        .iter_errors(&rules)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
    let known = documented();
    let page = read("envoy/dashboard/README.md");
    let mut names = BTreeSet::new();
    for rule in rules["groups"][0]["rules"].as_array().into_iter().flatten() {
        let name = rule["alert"].as_str().unwrap_or_default();
        is_documented(name, rule["expr"].as_str().unwrap_or_default(), &known);
        assert!(names.insert(name.to_owned()), "{name} is there twice");
        assert!(
            page.contains(&format!("`{name}`")),
            "the page does not explain {name}"
        );
    }
    for wanted in [
        "PdRouterDisaggregationIsOff",
        "PdRouterRoleIsEmpty",
        "PdRouterOneWorkerGetsAll",
        "PdRouterKvLeaks",
        "PdRouterHasNoLeader",
        "PdRouterRefusesMany",
    ] {
        assert!(names.contains(wanted), "there is no alert {wanted}");
    }
}

/// All words of a page with the form of a metric's name.
fn names_in(page: &str) -> BTreeSet<String> {
    let part_of_a_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = page.split(|letter| !part_of_a_name(letter));
    let words = words.map(|word| word.trim_end_matches('_'));
    let names = words.filter(|word| word.starts_with("pd_router_"));
    names.map(str::to_owned).collect()
}

#[test]
fn the_pages_for_operators_speak_of_documented_metrics() {
    let known = documented();
    let mut seen = 0;
    for page in ["docs/troubleshooting.md", "docs/upgrading.md"] {
        for name in names_in(&read(page)) {
            let id_of_a_vm = name == "pd_router_2";
            // Without its labels, in the form before they are extracted.
            let base = name.split("___").next().unwrap_or_default();
            let base = base.strip_suffix("_reason").unwrap_or(base);
            assert!(id_of_a_vm || known.contains_key(base), "{page}: {name}");
            seen += 1;
        }
    }
    assert!(seen > 15, "only {seen} names");
}

/// Every error code of the filter is among the symptoms.
#[test]
fn every_code_of_an_error_is_in_troubleshooting() {
    let page = read("docs/troubleshooting.md");
    let errors = read("docs/errors.md");
    let codes = errors.lines().filter_map(|line| {
        let cell = line.strip_prefix('|')?.split('|').nth(4)?;
        let code = cell.trim().strip_prefix('`')?.strip_suffix('`')?;
        // An unknown model has an engine's kind of code: a status.
        code.parse::<u16>().is_err().then_some(code)
    });
    let codes: BTreeSet<&str> = codes.filter(|code| *code != "code").collect();
    assert!(codes.len() > 20, "only {codes:?}");
    for code in codes {
        assert!(
            page.contains(&format!("`{code}`")),
            "{code} is not explained"
        );
    }
}

#[test]
fn what_is_not_documented_is_found() {
    let known = documented();
    let found = std::panic::catch_unwind(|| {
        is_documented("a test", "rate(pd_router_no_such_total[5m])", &known)
    });
    assert!(found.is_err());
    assert!(labels_of("pd_router_queue_ms", &known).is_none());
    assert!(labels_of("pd_router_queue_ms_bucket", &known).is_some_and(|of| of.contains("le")));
}
