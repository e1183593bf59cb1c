//! The status page, in a real browser.

use std::path::PathBuf;
use std::process::Stdio;

use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{FAST, Fleet};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::process::unique_name;
use pd_router_e2e::{Proxy, paths};
use serde_json::json;
use tokio::process::Command;

/// Options that keep a browser from requesting anything but the page.
const QUIET: [&str; 9] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    // Virtual time, in milliseconds, in which the page reads its figures.
    "--virtual-time-budget=3000",
];

/// Loads a page in a window of this size; returns standard output.
async fn browse(url: &str, (width, height): (u32, u32), what: &str) -> String {
    let profile = paths::scratch().join(unique_name("browser"));
    let output = Command::new(paths::chromium())
        .args(QUIET)
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("--window-size={width},{height}"))
        .arg(what)
        .arg(url)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("a browser that runs");
    let _ = std::fs::remove_dir_all(profile);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A picture's width and height, and its number of colours.
fn look_at(picture: &PathBuf) -> (u32, u32, usize) {
    let file = std::fs::File::open(picture).expect("a screenshot");
    let mut decoder = png::Decoder::new(std::io::BufReader::new(file));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().expect("a picture");
    let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
    let info = reader.next_frame(&mut pixels).expect("pixels");
    let colours: std::collections::BTreeSet<&[u8]> =
        pixels.chunks_exact(info.color_type.samples()).collect();
    (info.width, info.height, colours.len())
}

pub async fn a_browser_shows_the_fleet_and_what_was_refused(proxy: Proxy) {
    let fleet = Fleet::start(1, 2, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    gateway.send(Ask::chat("hello")).await.expect(200);
    let body = json!({"model": "<i>nobody's</i>", "messages": []}).to_string();
    let unknown = Ask::post("/v1/chat/completions", body);
    gateway.send(unknown).await.expect_error(404);
    gateway.assert_comes_to_rest().await;
    let url = format!("http://{}/pd-router/", gateway.listen);

    let shown = browse(&url, (390, 844), "--dump-dom").await;
    for address in fleet
        .prefill_addresses()
        .iter()
        .chain(&fleet.decode_addresses())
    {
        assert!(
            shown.contains(address.as_str()),
            "{address} is not shown: {shown}"
        );
    }
    for text in [
        "2 decode workers",
        "1 prefill worker",
        "active",
        "404 model_not_found",
        // A client's text is escaped.
        "&lt;i&gt;nobody's&lt;/i&gt;",
    ] {
        assert!(shown.contains(text), "{text} is not shown: {shown}");
    }
    assert!(!shown.contains(">no answer"), "{shown}");

    for size in [(390, 844), (1280, 900)] {
        let picture = paths::scratch().join(format!("{}.png", unique_name("status")));
        browse(&url, size, &format!("--screenshot={}", picture.display())).await;
        let (width, height, colours) = look_at(&picture);
        assert_eq!((width, height), size);
        assert!(colours > 50, "a page of {colours} colours is empty");
    }
}

pub async fn the_page_is_not_there_unless_enabled_and_loads_nothing_from_outside(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut config = fleet.config();
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let page = gateway.send(Ask::get("/pd-router/")).await.expect(200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap_or_default();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    for outside in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!page.text().contains(outside), "{outside}");
    }
    drop(gateway);
    config["status"] = json!(false);
    let gateway = Gateway::start(proxy, &config, &[]).await;
    for path in ["/pd-router/", "/pd-router/status", "/pd-router"] {
        gateway.send(Ask::get(path)).await.expect_error(404);
    }
    gateway.assert_comes_to_rest().await;
}
