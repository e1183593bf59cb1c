//! Owns eligibility: the filters, in the order in which they are tried, and which of them left no worker.

use std::net::{IpAddr, SocketAddr};

/// Why a worker is filtered out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Filter {
    /// Has another role, serves another model, or belongs to another namespace.
    Role,
    /// Not bound yet.
    Binding,
    /// Failed this very request.
    Failed,
    /// Lacks a required taint, or may not exchange KV with the other worker.
    Taints,
    /// Not in the subset that the gateway names.
    Subset,
    /// Not among the ids that the caller allows.
    Allowed,
    /// Lacks the requested rank.
    Rank,
    /// Busier than its threshold, or has just reported overload.
    Overload,
}

impl Filter {
    /// The name used in messages, metrics and codes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Role => "role",
            Self::Binding => "binding",
            Self::Failed => "failed",
            Self::Taints => "taints",
            Self::Subset => "subset",
            Self::Allowed => "allowed_worker_ids",
            Self::Rank => "rank",
            Self::Overload => "overload",
        }
    }
}

/// The eligible entries of a list, as indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eligible {
    /// Every entry of a list of this length, without a stored list of indexes.
    All(usize),
    /// These, in ascending order; never empty.
    Some(Vec<usize>),
}

impl Eligible {
    /// Every entry of a list of this length.
    ///
    /// # Errors
    /// [`Filter::Role`] for an empty list.
    pub fn all(length: usize) -> Result<Self, Filter> {
        match length {
            0 => Err(Filter::Role),
            _ => Ok(Self::All(length)),
        }
    }

    /// Number of eligible entries.
    pub fn count(&self) -> usize {
        match self {
            Self::All(length) => *length,
            Self::Some(indexes) => indexes.len(),
        }
    }

    /// The list index of the eligible entry number `place`.
    pub fn nth(&self, place: usize) -> Option<usize> {
        match self {
            Self::All(length) => (place < *length).then_some(place),
            Self::Some(indexes) => indexes.get(place).copied(),
        }
    }

    /// The list indexes of the eligible entries.
    pub fn indexes(&self) -> impl Iterator<Item = usize> + Clone {
        let (all, some): (usize, &[usize]) = match self {
            Self::All(length) => (*length, &[]),
            Self::Some(indexes) => (0, indexes),
        };
        (0..all).chain(some.iter().copied())
    }

    /// Keeps the entries that pass.
    ///
    /// # Errors
    /// The filter, if no entry passes.
    pub fn narrow(
        self,
        filter: Filter,
        mut passes: impl FnMut(usize) -> bool,
    ) -> Result<Self, Filter> {
        let left: Vec<usize> = self.indexes().filter(|index| passes(*index)).collect();
        match left.len() {
            0 => Err(filter),
            count if count == self.count() => Ok(self),
            _ => Ok(Self::Some(left)),
        }
    }

    /// Keeps the entries that pass; if none does, all stay.
    pub fn prefer(self, passes: impl Fn(usize) -> bool) -> Self {
        match self.clone().narrow(Filter::Role, passes) {
            Ok(left) => left,
            Err(_) => self,
        }
    }
}

/// The endpoints that a gateway allows, as in the endpoint picker protocol: `ip:port`, or an address alone for all its
/// ports. An empty subset, which allows no endpoint, is not the same as no subset.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Subset {
    whole: Vec<SocketAddr>,
    hosts: Vec<IpAddr>,
}

impl Subset {
    /// Parses a comma-separated list. An entry that is no address allows no endpoint.
    pub fn parse(text: &str) -> Self {
        Self::of(text.split(','))
    }

    /// Parses a value of the gateway's metadata as the proxy hands it out: text, parsed as in a header, or a packed list of
    /// texts: their number, then (length, 0) for each, all of four bytes, little-endian, then the texts, each followed by
    /// two zeros (one for each half of the pair that it stands for). Any other value allows no endpoint.
    pub fn of_metadata(value: &[u8]) -> Self {
        match value.contains(&0) {
            true => Self::of(packed(value).unwrap_or_default().into_iter()),
            false => Self::parse(std::str::from_utf8(value).unwrap_or_default()),
        }
    }

    /// The subset of these entries.
    pub fn of<'t>(entries: impl Iterator<Item = &'t str>) -> Self {
        let mut subset = Self::default();
        for entry in entries.map(str::trim) {
            if let Ok(address) = entry.parse() {
                subset.whole.push(address);
            } else if let Ok(host) = entry.trim_matches(['[', ']']).parse() {
                subset.hosts.push(host);
            }
        }
        subset
    }

    /// Whether the subset contains a worker at that address.
    pub fn holds(&self, address: Option<SocketAddr>) -> bool {
        address.is_some_and(|address| {
            self.whole.contains(&address) || self.hosts.contains(&address.ip())
        })
    }
}

/// The keys of packed pairs.
fn packed(value: &[u8]) -> Option<Vec<&str>> {
    let number = |at: usize| {
        let bytes = value.get(at..at.checked_add(4)?)?;
        let bytes: [u8; 4] = bytes.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let count = number(0)?;
    let sizes_end = count.checked_mul(8)?.checked_add(4)?;
    if sizes_end > value.len() {
        return None;
    }
    let mut texts = Vec::with_capacity(count);
    let mut at = sizes_end;
    for nth in 0..count {
        let size_at = nth.checked_mul(8)?.checked_add(4)?;
        let (key, other) = (number(size_at)?, number(size_at.checked_add(4)?)?);
        let end = at.checked_add(key)?;
        texts.push(std::str::from_utf8(value.get(at..end)?).ok()?);
        at = end.checked_add(other)?.checked_add(2)?;
    }
    Some(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_that_leaves_nobody_is_told() {
        assert_eq!(Eligible::all(0), Err(Filter::Role));
        let all = Eligible::all(4).unwrap();
        let even = all.narrow(Filter::Taints, |index| index % 2 == 0).unwrap();
        assert_eq!(even, Eligible::Some(vec![0, 2]));
        assert_eq!(even.clone().prefer(|index| index > 5), even);
        assert_eq!(
            even.clone().prefer(|index| index > 1),
            Eligible::Some(vec![2])
        );
        assert_eq!(even.indexes().collect::<Vec<_>>(), [0, 2]);
        assert_eq!((even.count(), even.nth(1), even.nth(2)), (2, Some(2), None));
        assert_eq!(even.narrow(Filter::Subset, |_| false), Err(Filter::Subset));
    }

    #[test]
    fn a_subset_names_endpoints_or_hosts() {
        let subset = Subset::parse(" 10.0.0.1:8000, 10.0.0.2 ,[fd00::1]:80,fd00::2,nonsense,");
        let holds = |address: &str| subset.holds(Some(address.parse().unwrap()));
        assert!(holds("10.0.0.1:8000") && !holds("10.0.0.1:8001"));
        assert!(holds("10.0.0.2:1") && holds("[fd00::1]:80") && holds("[fd00::2]:9"));
        assert!(!holds("10.0.0.3:8000") && !subset.holds(None));
        assert!(!Subset::parse("").holds(Some("10.0.0.1:1".parse().unwrap())));
    }

    #[test]
    fn metadata_hold_text_or_a_list() {
        let pack = |entries: &[&str]| {
            let mut out = (entries.len() as u32).to_le_bytes().to_vec();
            for entry in entries {
                out.extend((entry.len() as u32).to_le_bytes());
                out.extend(0_u32.to_le_bytes());
            }
            for entry in entries {
                out.extend(entry.as_bytes());
                out.extend([0, 0]);
            }
            out
        };
        let entries = ["10.0.0.1:8000", " 10.0.0.2", "[fd00::1]:80"];
        let wanted = Subset::of(entries.into_iter());
        assert_eq!(Subset::of_metadata(&pack(&entries)), wanted);
        assert_eq!(Subset::of_metadata(entries.join(",").as_bytes()), wanted);
        for no_subset in [
            &pack(&[])[..],
            b"",
            &[0],
            &[255, 255, 255, 255, 0],
            &pack(&entries)[..40],
        ] {
            assert_eq!(
                Subset::of_metadata(no_subset),
                Subset::default(),
                "{no_subset:?}"
            );
        }
    }
}
