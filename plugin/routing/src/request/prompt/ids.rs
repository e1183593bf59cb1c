//! Owns prompts sent as token ids, and how they are read from JSON.
//!
//! Long lists of numbers are the one thing in a request that a general parser reads slowly, so they are read by hand.

use super::canonical::elements;

/// Separates the prompts of a batch; no vocabulary is that large.
const BETWEEN: [u8; 4] = u32::MAX.to_le_bytes();

/// The token ids of a prompt, or of a batch of prompts one after the other.
#[derive(Debug, Default)]
pub struct TokenIds {
    /// Little-endian, four bytes each.
    bytes: Vec<u8>,
    count: u64,
}

impl TokenIds {
    /// Ids that are already known.
    pub fn given(ids: &[u32]) -> Self {
        Self {
            bytes: ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            count: ids.len() as u64,
        }
    }

    /// Reads a list of ids, or a list of such lists, from valid JSON. None for anything else.
    pub fn read(prompt: &str) -> Option<Self> {
        let mut ids = Self::default();
        let inside = prompt.strip_prefix('[')?.trim_ascii_start();
        match inside.as_bytes().first()? {
            b'[' => ids.read_batch(prompt)?,
            b']' => {}
            b'0'..=b'9' => ids.read_list(prompt)?,
            _ => return None,
        }
        Some(ids)
    }

    /// The ids as little-endian bytes, with a number that is no id between the prompts of a batch.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of ids.
    pub fn count(&self) -> u64 {
        self.count
    }

    fn read_batch(&mut self, lists: &str) -> Option<()> {
        let mut outcome = Some(());
        elements(lists, |list| {
            if !self.bytes.is_empty() {
                self.bytes.extend_from_slice(&BETWEEN);
            }
            outcome = outcome.and_then(|()| self.read_list(list));
        });
        outcome
    }

    fn read_list(&mut self, list: &str) -> Option<()> {
        let inside = list.strip_prefix('[')?.strip_suffix(']')?;
        let mut rest = inside.as_bytes().trim_ascii_start();
        // An id of five digits and its comma become four bytes.
        self.bytes.reserve(rest.len() / 6 * 4);
        if rest.is_empty() {
            return Some(());
        }
        loop {
            let (id, after) = leading_number(rest)?;
            self.bytes.extend_from_slice(&id.to_le_bytes());
            self.count = self.count.saturating_add(1);
            rest = match skip_space(after).split_first() {
                Some((b',', more)) => skip_space(more),
                Some(_) => return None,
                None => return Some(()),
            };
        }
    }
}

fn skip_space(text: &[u8]) -> &[u8] {
    match text.first() {
        Some(b' ' | b'\t' | b'\n' | b'\r') => text.trim_ascii_start(),
        _ => text,
    }
}

/// The number at the beginning of `text`, and the bytes after it. None without a number, or if it is too large for an id.
fn leading_number(text: &[u8]) -> Option<(u32, &[u8])> {
    if let Some(eight) = text.first_chunk::<8>() {
        let (number, digits) = number_in(u64::from_le_bytes(*eight));
        if (1..8).contains(&digits) {
            return Some((number, text.get(digits..)?));
        }
    }
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (number, rest) = text.split_at_checked(digits)?;
    Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
}

/// The decimal number at the beginning of eight characters, lowest byte first, and its number of digits. All digits are
/// found and added at once, without a branch on their count, which is hard to predict for ids.
fn number_in(characters: u64) -> (u32, usize) {
    const ONES: u64 = u64::MAX / 0xff;
    let values = characters ^ (ONES * u64::from(b'0'));
    // The high bit of every byte above nine.
    let others = (values.wrapping_add(ONES * (0x7f - 9)) | values) & (ONES << 7);
    let bits = others.trailing_zeros() & !7;
    // Replaces the characters after the digits by leading zeros; nothing is left if the first is no digit.
    let digits = values.checked_shl(64 - bits).unwrap_or_default();
    // Bytes 0, 2, 4 and 6 become the numbers of two digits each; then these are weighted and added in the upper half.
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let every_other = |pairs: u64| pairs & 0xff_0000_00ff;
    let first_and_third = every_other(pairs).wrapping_mul(100 | 1_000_000 << 32);
    let second_and_fourth = every_other(pairs >> 16).wrapping_mul(1 | 10_000 << 32);
    let number = first_and_third.wrapping_add(second_and_fourth) >> 32;
    (number as u32, (bits / 8) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_number_ends_where_its_digits_end() {
        for (text, number, digits) in [
            ("1,2,3,4,", 1, 1),
            ("12345678", 12345678, 8),
            ("1234567,", 1234567, 7),
            ("00000000", 0, 8),
            ("90000000", 90000000, 8),
            ("99999999", 99999999, 8),
            ("12 34567", 12, 2),
            ("/2345678", 0, 0),
            (":2345678", 0, 0),
            ("1.5e3000", 1, 1),
            ("12\u{e9}\u{e9}34", 12, 2),
            ("-1234567", 0, 0),
        ] {
            let eight: [u8; 8] = text.as_bytes().try_into().unwrap();
            let (found, length) = number_in(u64::from_le_bytes(eight));
            assert_eq!((found, length), (number, digits), "{text}");
        }
    }

    proptest! {
        #[test]
        fn ids_are_read_as_a_parser_reads_them(
            lists in prop::collection::vec(prop::collection::vec(any::<(u32, u8)>(), 0..20), 0..4),
            space in prop::sample::select(&["", " ", "\n\t"][..]),
        ) {
            let lists: Vec<Vec<u32>> = lists
                .into_iter()
                .map(|list| list.into_iter().map(|(id, shift)| id >> (shift % 32)).collect())
                .collect();
            let spelt = |list: &[u32]| {
                let ids: Vec<String> = list.iter().map(|id| format!("{space}{id}{space}")).collect();
                format!("[{space}{}]", ids.join(","))
            };
            for list in &lists {
                let ids = TokenIds::read(&spelt(list)).unwrap();
                let expected = TokenIds::given(list);
                prop_assert_eq!(ids.bytes(), expected.bytes());
                prop_assert_eq!(ids.count(), list.len() as u64);
            }
            let batch: Vec<String> = lists.iter().map(|list| spelt(list)).collect();
            let batch = TokenIds::read(&format!("[{}]", batch.join(","))).unwrap();
            prop_assert_eq!(batch.count(), lists.iter().flatten().count() as u64);
        }

        #[test]
        fn what_begins_as_a_list_is_ids_or_nothing(text in "\\[[0-9, .e+a\\[\\]\"-]{0,20}\\]") {
            let ids = TokenIds::read(&text).map(|ids| ids.bytes().to_vec());
            if let Ok(expected) = serde_json::from_str::<Vec<u32>>(&text) {
                prop_assert_eq!(ids, Some(TokenIds::given(&expected).bytes().to_vec()));
            } else if serde_json::from_str::<Vec<Vec<u32>>>(&text).is_err()
                && serde_json::from_str::<serde_json::Value>(&text).is_ok()
            {
                prop_assert_eq!(ids, None);
            }
        }
    }
}
