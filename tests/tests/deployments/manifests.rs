//! Every Kubernetes object fits its schema, and the objects of a folder fit each other.

use std::collections::BTreeMap;
use std::fs;

use jsonschema::Validator;
use pd_router_e2e::paths::workspace;
use serde_json::Value;

use crate::files::{Document, document, folders, object, objects, read};

const SCHEMAS: [&str; 6] = [
    "core",
    "kustomize",
    "gateway-api",
    "inference",
    "envoy-gateway",
    "istio",
];

/// One for each `apiVersion/Kind`.
fn schemas() -> BTreeMap<String, Validator> {
    let mut all = BTreeMap::new();
    for group in SCHEMAS {
        let kinds = document(&format!("tests/fixtures/schemas/{group}.yaml"));
        let kinds = kinds.as_object().cloned().unwrap_or_default();
        for (kind, schema) in kinds {
            let built = jsonschema::draft202012::new(&schema)
                .unwrap_or_else(|error| panic!("{group}: {kind}: {error}"));
            all.insert(kind, built);
        }
    }
    all
}

fn complaints(schema: &Validator, content: &Value) -> Vec<String> {
    let errors = schema.iter_errors(content);
    errors
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect()
}

fn kind_of(document: &Document) -> String {
    let text = |field: &str| document.content[field].as_str().unwrap_or("?").to_owned();
    format!("{}/{}", text("apiVersion"), text("kind"))
}

#[test]
fn every_object_fits_its_schema() {
    let schemas = schemas();
    let objects = objects();
    assert!(objects.len() > 40, "only {} objects", objects.len());
    for object in objects {
        let schema = schemas
            .get(&kind_of(&object))
            .unwrap_or_else(|| panic!("{}: no schema of {}", object.title(), kind_of(&object)));
        let complaints = complaints(schema, &object.content);
        assert!(complaints.is_empty(), "{}: {complaints:#?}", object.title());
    }
}

/// A schema that accepts everything would find nothing.
#[test]
fn every_schema_refuses_a_field_that_it_does_not_know() {
    let schemas = schemas();
    for mut object in objects() {
        let schema = &schemas[&kind_of(&object)];
        let title = object.title();
        object.content["nonsense"] = Value::Bool(true);
        assert!(!complaints(schema, &object.content).is_empty(), "{title}");
    }
}

#[test]
fn every_folder_says_how_to_apply_it() {
    for folder in folders() {
        let page = read(&format!("{folder}/README.md"));
        let lines = page.lines().count();
        assert!((10..=70).contains(&lines), "{folder}: {lines} lines");
        let commands = ["kubectl apply", "envoy -c", "skopeo", "promtool"];
        assert!(
            commands.iter().any(|command| page.contains(command)),
            "{folder} says no command"
        );
    }
}

/// Pages whose links are checked.
fn pages() -> Vec<String> {
    let docs = fs::read_dir(workspace().join("docs")).expect("docs");
    let docs = docs.map(|entry| entry.expect("an entry").file_name());
    let docs = docs.map(|name| format!("docs/{}", name.display()));
    let folders = folders();
    let folders = folders.iter().map(|folder| format!("{folder}/README.md"));
    let others = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "envoy/config-reference.md",
    ];
    docs.filter(|name| name.ends_with(".md"))
        .chain(folders)
        .chain(others.map(str::to_owned))
        .collect()
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text
            .chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Links within the repository; other links are not checked.
#[test]
fn every_link_of_a_page_leads_somewhere() {
    for file in pages() {
        let (folder, _) = file.rsplit_once('/').unwrap_or_default();
        let page = read(&file);
        let targets = page
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let linked = match path {
                "" => workspace().join(&file),
                path => workspace().join(folder).join(path),
            };
            assert!(linked.exists(), "{file}: {target} is not there");
            if !anchor.is_empty() {
                let page = fs::read_to_string(&linked).expect("a page");
                let anchors = anchors(&page);
                assert!(
                    anchors.iter().any(|known| known == anchor),
                    "{file}: {target} is no heading"
                );
            }
        }
    }
}

#[test]
fn every_kustomization_names_what_is_there() {
    let kustomizations = objects();
    let kustomizations = kustomizations
        .iter()
        .filter(|object| object.is("Kustomization"));
    for found in kustomizations {
        let (folder, _) = found.file.rsplit_once('/').unwrap_or_default();
        let generated = found.content["configMapGenerator"].as_array();
        let files = generated.into_iter().flatten().map(|made| &made["files"]);
        let listed = files.chain([&found.content["resources"]]);
        for name in listed.filter_map(Value::as_array).flatten() {
            let name = name.as_str().unwrap_or_default();
            let path = workspace().join(folder).join(name);
            assert!(path.exists(), "{}: {name} is not there", found.file);
        }
    }
}

/// A service's selector finds the pods of a deployment in the same file, and its port is one of theirs.
#[test]
fn every_service_finds_its_pods() {
    let objects = objects();
    let services: Vec<_> = objects
        .iter()
        .filter(|object| object.is("Service"))
        .collect();
    assert!(services.len() > 10, "only {} services", services.len());
    for service in services {
        let deployments = objects
            .iter()
            .filter(|object| object.is("Deployment") && object.file == service.file);
        let pods = deployments
            .map(|deployment| &deployment.content["spec"]["template"])
            .find(|pods| pods["metadata"]["labels"] == service.content["spec"]["selector"]);
        let pods = pods.unwrap_or_else(|| panic!("{} finds no pods", service.title()));
        let ports = ports_of(pods);
        for port in service.content["spec"]["ports"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let wanted = port.get("targetPort").unwrap_or(&port["port"]);
            assert!(ports.contains(wanted), "{}: {wanted}", service.title());
        }
    }
}

/// The numbers and the names of the ports of a pod's containers.
fn ports_of(pods: &Value) -> Vec<Value> {
    let containers = ["containers", "initContainers"].map(|list| pods["spec"][list].as_array());
    let containers = containers.into_iter().flatten().flatten();
    let ports = containers.filter_map(|container| container["ports"].as_array());
    let named = ports.flatten();
    named
        .flat_map(|port| [port["containerPort"].clone(), port["name"].clone()])
        .collect()
}

/// Envoy finds the pool's pods through a service: both must select the same pods.
#[test]
fn the_inference_pool_and_its_service_mean_the_same_pods() {
    let file = "envoy/inference-pool/workers.yaml";
    let pool = object(file, "InferencePool");
    let service = object(file, "Service");
    let (pool, service) = (&pool["spec"], &service["spec"]);
    assert_eq!(pool["selector"]["matchLabels"], service["selector"]);
    assert_eq!(
        pool["targetPorts"][0]["number"],
        service["ports"][0]["port"]
    );
}

/// The names that a bootstrap's clusters resolve are those of the folder's headless services.
#[test]
fn every_name_that_a_bootstrap_resolves_is_a_headless_service_of_its_folder() {
    let objects = objects();
    let mut seen = 0;
    for file in crate::files::bootstraps() {
        let (folder, _) = file.rsplit_once('/').unwrap_or_default();
        if folder == "envoy" {
            continue;
        }
        let text = read(&file);
        let names = text.split(".llm.svc.cluster.local").map(|before| {
            let name = before.rsplit([' ', ':']).next().unwrap_or_default();
            name.to_owned()
        });
        let all: Vec<String> = names.collect();
        for name in &all[..all.len() - 1] {
            let headless = objects.iter().any(|object| {
                object.is("Service")
                    && object.file == format!("{folder}/workers.yaml")
                    && object.content["metadata"]["name"] == name.as_str()
                    && object.content["spec"]["clusterIP"] == "None"
            });
            assert!(headless, "{file}: {name} is no headless service");
            seen += 1;
        }
    }
    assert!(seen >= 9, "only {seen} names");
}
