//! Tests that the committed files equal those generated from the configuration's types.

use super::*;

const COMMITTED_SCHEMA: &str = include_str!("../../../envoy/config.schema.json");
const COMMITTED_PAGE: &str = include_str!("../../../envoy/config-reference.md");

#[test]
fn the_schema_is_that_of_the_types() {
    assert!(
        schema::text() == COMMITTED_SCHEMA,
        "envoy/config.schema.json is not what the types say: `make reference` writes it anew"
    );
}

#[test]
fn the_reference_is_that_of_the_types() {
    let made = page(COMMITTED_PAGE).unwrap();
    assert!(
        made == COMMITTED_PAGE,
        "the tables of envoy/config-reference.md are not what the types say: `make reference` writes them anew"
    );
}

#[test]
fn a_page_gets_its_tables_and_keeps_its_prose() {
    let old = "# One\nProse.\n<!-- fields of Limits -->\nyesterday\n<!-- end -->\nMore.\n## Two of them\n<!-- fields of Sharing -->\n<!-- end -->\n## All\n<!-- fields of Config -->\n<!-- end -->\n";
    let made = page(old).unwrap();
    assert!(made.starts_with("# One\nProse.\n<!-- fields of Limits -->\n| field |"));
    assert!(!made.contains("yesterday"), "{made}");
    assert!(made.contains("<!-- end -->\nMore.\n"), "{made}");
    assert!(
        made.contains("| `bodies_in_flight_bytes` | bytes, at least 1 | `268435456` |"),
        "{made}"
    );
    assert!(
        made.contains("| `interval_ms` | milliseconds, 20 to 100 | `25` |"),
        "{made}"
    );
    // A type with a table is linked, the fields of one without are in its parent's table.
    assert!(
        made.contains("| `sharing` | [two of them](#two-of-them) |"),
        "{made}"
    );
    assert!(
        made.contains("| `pools[].prefill.hedge_after_ms` | milliseconds, at least 1 | none |"),
        "{made}"
    );
    // A second pass changes nothing.
    assert_eq!(page(&made).unwrap(), made);
}

#[test]
fn a_page_that_asks_for_nothing_is_told_so() {
    let of_nothing = page("<!-- fields of Nothing -->\n<!-- end -->\n");
    assert_eq!(of_nothing, Err(PageError::NoSuchType("Nothing".to_owned())));
    let endless = page("<!-- fields of Limits -->\n");
    assert_eq!(endless, Err(PageError::NoEnd("Limits".to_owned())));
}
