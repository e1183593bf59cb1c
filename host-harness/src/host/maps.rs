//! Owns header maps as the plugin sees them: ordered pairs of bytes, and their serialized form in the proxy-wasm ABI.

/// An ordered list of headers. Names are lower-case; values are bytes and need not be UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<(Vec<u8>, Vec<u8>)>);

/// Why a serialized map cannot be parsed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a serialized header map ends before its last entry")]
pub struct Truncated;

impl Headers {
    /// The first value of `name`, as in Envoy.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.0
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_slice())
    }

    /// Replaces every value of `name` by this one; adds the header if there is none.
    pub fn set(&mut self, name: &[u8], value: &[u8]) {
        let Some(first) = self.position(name) else {
            return self.add(name, value);
        };
        self.0[first].1 = value.to_vec();
        let mut index = 0;
        self.0.retain(|(known, _)| {
            index += 1;
            index - 1 <= first || !known.eq_ignore_ascii_case(name)
        });
    }

    /// Adds one more value of `name`.
    pub fn add(&mut self, name: &[u8], value: &[u8]) {
        self.0.push((name.to_ascii_lowercase(), value.to_vec()));
    }

    /// Removes every value of `name`.
    pub fn remove(&mut self, name: &[u8]) {
        self.0
            .retain(|(known, _)| !known.eq_ignore_ascii_case(name));
    }

    /// Removes the headers whose name `unwanted` accepts.
    pub fn remove_where(&mut self, unwanted: impl Fn(&[u8]) -> bool) {
        self.0.retain(|(name, _)| !unwanted(name));
    }

    /// All pairs in order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_slice(), value.as_slice()))
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Total bytes of names and values.
    pub fn bytes(&self) -> usize {
        self.0
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum()
    }

    /// The declared length of the body, if present and valid.
    pub fn content_length(&self) -> Option<u64> {
        let text = std::str::from_utf8(self.get(b"content-length")?).ok()?;
        text.trim().parse().ok()
    }

    /// The map as the ABI transports it: count, lengths of names and values, then both, each ended by a zero byte.
    pub fn serialize(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(4 + self.len() * 10 + self.bytes());
        bytes.extend_from_slice(&length(self.len()));
        for (name, value) in &self.0 {
            bytes.extend_from_slice(&length(name.len()));
            bytes.extend_from_slice(&length(value.len()));
        }
        for (name, value) in &self.0 {
            bytes.extend_from_slice(name);
            bytes.push(0);
            bytes.extend_from_slice(value);
            bytes.push(0);
        }
        bytes
    }

    /// Parses the serialized form. No bytes at all are an empty map.
    pub fn parse(bytes: &[u8]) -> Result<Headers, Truncated> {
        if bytes.is_empty() {
            return Ok(Headers::default());
        }
        let count = read_length(bytes, 0)?;
        let mut text = count
            .checked_mul(8)
            .and_then(|size| size.checked_add(4))
            .ok_or(Truncated)?;
        let mut headers = Headers::default();
        for entry in 0..count {
            let lengths = 4 + entry * 8;
            let name = read_text(bytes, &mut text, read_length(bytes, lengths)?)?;
            let value = read_text(bytes, &mut text, read_length(bytes, lengths + 4)?)?;
            headers.add(name, value);
        }
        Ok(headers)
    }

    fn position(&self, name: &[u8]) -> Option<usize> {
        self.0
            .iter()
            .position(|(known, _)| known.eq_ignore_ascii_case(name))
    }
}

impl<N: AsRef<[u8]>, V: AsRef<[u8]>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        let mut headers = Headers::default();
        headers.extend(pairs);
        headers
    }
}

impl<N: AsRef<[u8]>, V: AsRef<[u8]>> Extend<(N, V)> for Headers {
    fn extend<I: IntoIterator<Item = (N, V)>>(&mut self, pairs: I) {
        for (name, value) in pairs {
            self.add(name.as_ref(), value.as_ref());
        }
    }
}

/// Sizes in the ABI are 32-bit; a 32-bit guest holds nothing longer.
fn length(size: usize) -> [u8; 4] {
    u32::try_from(size).unwrap_or(u32::MAX).to_le_bytes()
}

fn read_length(bytes: &[u8], at: usize) -> Result<usize, Truncated> {
    let end = at.checked_add(4).ok_or(Truncated)?;
    let field = bytes.get(at..end).ok_or(Truncated)?;
    let field = <[u8; 4]>::try_from(field).map_err(|_| Truncated)?;
    Ok(u32::from_le_bytes(field) as usize)
}

fn read_text<'a>(bytes: &'a [u8], at: &mut usize, size: usize) -> Result<&'a [u8], Truncated> {
    let end = at.checked_add(size).ok_or(Truncated)?;
    let text = bytes.get(*at..end).ok_or(Truncated)?;
    *at = end + 1;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_keeps_bytes_that_are_not_utf8() {
        let headers: Headers = [
            (&b":path"[..], &b"/v1"[..]),
            (b"x-t", b"\xff\xfe"),
            (b"empty", b""),
        ]
        .into_iter()
        .collect();
        assert_eq!(Headers::parse(&headers.serialize()), Ok(headers));
    }

    #[test]
    fn serialized_form_is_the_one_of_the_abi() {
        let headers: Headers = [("A", "bc")].into_iter().collect();
        assert_eq!(
            headers.serialize(),
            [1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, b'a', 0, b'b', b'c', 0]
        );
    }

    #[test]
    fn truncated_maps_are_refused() {
        let whole = [("name", "value")]
            .into_iter()
            .collect::<Headers>()
            .serialize();
        for cut in 1..whole.len() - 1 {
            assert_eq!(
                Headers::parse(&whole[..cut]),
                Err(Truncated),
                "cut at {cut}"
            );
        }
        assert_eq!(Headers::parse(&[0xff; 12]), Err(Truncated));
        assert_eq!(Headers::parse(&[]), Ok(Headers::default()));
    }

    #[test]
    fn set_replaces_all_values_and_keeps_the_place_of_the_first() {
        let mut headers: Headers = [("a", "1"), ("b", "2"), ("a", "3")].into_iter().collect();
        headers.set(b"A", b"4");
        let expected: Headers = [("a", "4"), ("b", "2")].into_iter().collect();
        assert_eq!(headers, expected);
        headers.remove(b"a");
        assert_eq!(headers.get(b"a"), None);
    }
}
