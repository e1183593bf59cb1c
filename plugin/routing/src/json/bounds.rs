//! Owns the limits on a JSON text's nesting and number of values: the cost of reading it depends on both.

use memchr::{memchr2_iter, memchr3_iter};

use super::outside_strings;

/// Maximum JSON values in a request: about twice a prompt of a million ids. Reading a value takes some ten times as long as
/// skipping a byte of text, so a text of values only would keep a thread from its other requests.
pub const MAX_VALUES: usize = 2 * 1024 * 1024;

/// Whether `json` has more than `most` values; names of members count as values. For invalid JSON the answer is approximate.
pub fn has_more_values_than(most: usize, json: &[u8]) -> bool {
    // Every value but the first follows one of these bytes, and most texts have fewer of them, inside and outside of strings.
    if memchr3_iter(b',', b'[', b'{', json).nth(most / 2).is_none() {
        return false;
    }
    let begins_value = |byte: &u8| matches!(byte, b',' | b'[' | b'{' | b':');
    outside_strings(json)
        .filter(begins_value)
        .nth(most)
        .is_some()
}

/// Whether lists and objects nest more than `most` deep in `json`, which must be valid.
pub fn is_deeper_than(most: usize, json: &[u8]) -> bool {
    // Most texts have fewer brackets than that; counting them is quicker.
    if memchr2_iter(b'[', b'{', json).nth(most).is_none() {
        return false;
    }
    let mut depth = 0_usize;
    outside_strings(json).any(|byte| {
        match byte {
            b'[' | b'{' => depth = depth.saturating_add(1),
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > most
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        let list = |element: &str, count: usize| format!("[{}]", vec![element; count].join(","));
        for (text, values) in [
            (list("1", 1000), 1000),
            (list("\"\"", 1000), 1000),
            (list("\",[{:\\\"\"", 1000), 1000),
            (list("[]", 1000), 2000),
            (list("{\"a\":1}", 1000), 3000),
        ] {
            assert!(
                has_more_values_than(values - 1, text.as_bytes()),
                "{values}"
            );
            assert!(!has_more_values_than(values, text.as_bytes()), "{values}");
        }
        let text = format!("{{\"content\":\"{}\"}}", "a, [b] {c}: \\n".repeat(1000));
        assert!(!has_more_values_than(2, text.as_bytes()));
        assert!(has_more_values_than(10, &b"[".repeat(100)));
        assert!(!has_more_values_than(10, b"\"[[[[[[[[[[[[[[[[[[["));
    }
}
