//! Owns the formatting of figures: no digit beyond their precision.

use super::select::KB;

/// About three digits: 0.42, 4.17, 41.7, 417, 4,170.
pub fn short(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "–".to_owned(),
        ..9.995 => format!("{value:.2}"),
        ..99.95 => format!("{value:.1}"),
        _ => thousands(value),
    }
}

/// An integer with thousands separators.
pub fn thousands(value: f64) -> String {
    if !value.is_finite() {
        return "–".to_owned();
    }
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    match value.is_sign_negative() && digits != "0" {
        true => format!("−{text}"),
        false => text,
    }
}

/// A share from 0 to 1 in per cent. A share below 1 never becomes 100 %.
pub fn percent(part: f64) -> String {
    let percent = part * 100.0;
    match percent {
        _ if !percent.is_finite() => "–".to_owned(),
        100.0.. => "100 %".to_owned(),
        99.9.. => "99.9 %".to_owned(),
        _ => format!("{percent:.1} %"),
    }
}

/// Bytes of a body, as text.
pub fn bytes(count: usize) -> String {
    match count % KB {
        0 => format!("{} KB", thousands((count / KB) as f64)),
        _ => format!("{} B", thousands(count as f64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_or_so() {
        let all = [
            0.4249,
            4.169,
            9.996,
            41.69,
            99.96,
            416.9,
            4_169.0,
            1_234_567.0,
        ];
        assert_eq!(
            all.map(short),
            [
                "0.42",
                "4.17",
                "10.0",
                "41.7",
                "100",
                "417",
                "4,169",
                "1,234,567"
            ]
        );
        assert_eq!([f64::NAN, f64::INFINITY].map(short), ["–", "–"]);
        assert_eq!([-0.4, -1234.0].map(thousands), ["0", "−1,234"]);
    }

    #[test]
    fn not_all_is_not_written_as_all() {
        assert_eq!(
            [1.0, 0.99996, 0.9951, 0.0, f64::NAN].map(percent),
            ["100 %", "99.9 %", "99.5 %", "0.0 %", "–"]
        );
    }

    #[test]
    fn bodies_are_named_by_their_size() {
        assert_eq!(
            [1024, 225_280, 1000].map(bytes),
            ["1 KB", "220 KB", "1,000 B"]
        );
    }
}
