//! Owns who may be picked at all: the filters, in the order in which they are tried, and which of them left nobody.

use std::net::{IpAddr, SocketAddr};

/// What a worker is passed over for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Filter {
    /// It has another role, serves another model, or belongs to another namespace.
    Role,
    /// It is not connected yet.
    Binding,
    /// It failed this very request.
    Failed,
    /// It lacks a taint that is required, or may not exchange KV with the other worker.
    Taints,
    /// It is not in the subset that the gateway names.
    Subset,
    /// It is not among the ids that the caller allows.
    Allowed,
    /// It has just refused connections, or not answered.
    Health,
    /// It has not the rank that is asked for.
    Rank,
    /// It is busier than its threshold, or has just said so.
    Overload,
}

impl Filter {
    /// All filters, in order.
    pub const ALL: [Self; 9] = [
        Self::Role,
        Self::Binding,
        Self::Failed,
        Self::Taints,
        Self::Subset,
        Self::Allowed,
        Self::Health,
        Self::Rank,
        Self::Overload,
    ];

    /// The name used in messages, metrics and codes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Role => "role",
            Self::Binding => "binding",
            Self::Failed => "failed",
            Self::Taints => "taints",
            Self::Subset => "subset",
            Self::Allowed => "allowed_worker_ids",
            Self::Health => "health",
            Self::Rank => "rank",
            Self::Overload => "overload",
        }
    }
}

/// Those who are left, as indexes into a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eligible {
    /// Everyone of a list of that length: nobody had to be written down.
    All(usize),
    /// These, in ascending order; never none.
    Some(Vec<usize>),
}

impl Eligible {
    /// Everyone of a list of that length.
    ///
    /// # Errors
    /// [`Filter::Role`] when there is nobody.
    pub fn all(length: usize) -> Result<Self, Filter> {
        match length {
            0 => Err(Filter::Role),
            _ => Ok(Self::All(length)),
        }
    }

    /// How many are left.
    pub fn count(&self) -> usize {
        match self {
            Self::All(length) => *length,
            Self::Some(indexes) => indexes.len(),
        }
    }

    /// The index of the one at that place among those who are left.
    pub fn nth(&self, place: usize) -> Option<usize> {
        match self {
            Self::All(length) => (place < *length).then_some(place),
            Self::Some(indexes) => indexes.get(place).copied(),
        }
    }

    /// Their indexes.
    pub fn indexes(&self) -> impl Iterator<Item = usize> + Clone {
        let (all, some): (usize, &[usize]) = match self {
            Self::All(length) => (*length, &[]),
            Self::Some(indexes) => (0, indexes),
        };
        (0..all).chain(some.iter().copied())
    }

    /// Those who pass.
    ///
    /// # Errors
    /// The filter, when it leaves nobody.
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

    /// Those who pass; where nobody would, all stay.
    pub fn prefer(self, passes: impl Fn(usize) -> bool) -> Self {
        match self.clone().narrow(Filter::Role, passes) {
            Ok(left) => left,
            Err(_) => self,
        }
    }
}

/// The endpoints that a gateway allows, as the endpoint picker protocol has it: `ip:port`, or an address alone, which stands
/// for all its ports. One that allows nobody is not the same as none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Subset {
    whole: Vec<SocketAddr>,
    hosts: Vec<IpAddr>,
}

impl Subset {
    /// Reads a list that is separated by commas. What is no address allows nobody.
    pub fn parse(text: &str) -> Self {
        Self::of(text.split(','))
    }

    /// Reads what a gateway's metadata hold, as the proxy hands it out: text, which is read as in a header, or a list of texts,
    /// packed as their number, then (length, 0) for each, all of four bytes, little-endian, then the texts, each with two zeros
    /// behind it (one for each of the pair that it stands for). What is neither allows nobody.
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

    /// Whether a worker at that address is in it.
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
        for nobody in [
            &pack(&[])[..],
            b"",
            &[0],
            &[255, 255, 255, 255, 0],
            &pack(&entries)[..40],
        ] {
            assert_eq!(Subset::of_metadata(nobody), Subset::default(), "{nobody:?}");
        }
    }
}
