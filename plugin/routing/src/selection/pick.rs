//! Owns the last step: one index out of several costs or counts, without preference for any index.

use super::Random;

/// The index of the least value; equal ones are equally likely.
pub fn least<T: PartialOrd + Copy>(
    values: impl Iterator<Item = T>,
    random: &mut Random,
) -> Option<usize> {
    let mut best: Option<(usize, T)> = None;
    let mut equals = 1u64;
    // Not `for`: this way the computation of a value is inlined into the loop, not called a thousand times.
    values.enumerate().for_each(|(index, value)| {
        let Some((_, least)) = best else {
            best = Some((index, value));
            return;
        };
        if value < least {
            best = Some((index, value));
            equals = 1;
        } else if value == least {
            // The k-th equal value replaces the best with probability 1/k.
            equals = equals.saturating_add(1);
            if random.u64(0..equals) == 0 {
                best = Some((index, value));
            }
        }
    });
    best.map(|(index, _)| index)
}

/// An index drawn by weight; none if all weights are 0.
pub fn weighted(weights: &[u64], random: &mut Random) -> Option<usize> {
    let total: u64 = weights.iter().sum();
    if total == 0 {
        return None;
    }
    let mut drawn = random.u64(0..total);
    weights.iter().position(|weight| match drawn < *weight {
        true => true,
        false => {
            drawn -= *weight;
            false
        }
    })
}

/// An index drawn with odds that fall with its cost: a softmax over costs scaled to the range from the least to the
/// greatest. Temperature 0 picks the least; if all are equal, or not comparable, all are equally likely.
pub fn softmax(costs: &[f64], temperature: f64, random: &mut Random) -> Option<usize> {
    if temperature <= 0.0 {
        return least(costs.iter().copied(), random);
    }
    let low = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let high = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let range = (high - low) * temperature;
    if !range.is_finite() || range <= 0.0 {
        return (!costs.is_empty()).then(|| random.usize(0..costs.len()));
    }
    let odds = |cost: &f64| (-(cost - low) / range).exp();
    let total: f64 = costs.iter().map(odds).sum();
    let mut drawn = random.f64() * total;
    let found = costs.iter().position(|cost| {
        drawn -= odds(cost);
        drawn < 0.0
    });
    // A remainder left by rounding belongs to the last index.
    found.or(costs.len().checked_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(n: usize, mut pick: impl FnMut(&mut Random) -> usize) -> Vec<u32> {
        let mut random = Random::with_seed(11);
        let mut counts = vec![0; n];
        for _ in 0..10_000 {
            counts[pick(&mut random)] += 1;
        }
        counts
    }

    #[test]
    fn equals_are_equally_likely_wherever_they_stand() {
        let costs = [5.0, 1.0, 1.0, 7.0, 1.0, 1.0];
        let counts = counts(6, |random| least(costs.into_iter(), random).unwrap());
        assert_eq!((counts[0], counts[3]), (0, 0));
        for index in [1, 2, 4, 5] {
            assert!((2300..2700).contains(&counts[index]), "{counts:?}");
        }
    }

    #[test]
    fn odds_fall_with_cost_and_do_not_depend_on_its_unit() {
        let odds = |scale: f64| {
            let costs = [10.0 * scale, 20.0 * scale, 30.0 * scale];
            counts(3, |random| softmax(&costs, 0.5, random).unwrap())
        };
        let (small, large) = (odds(1.0), odds(1e9));
        assert_eq!(small, large);
        // exp(0) : exp(-1) : exp(-2)
        assert!((6400..6900).contains(&small[0]), "{small:?}");
        assert!((2250..2650).contains(&small[1]), "{small:?}");
    }

    #[test]
    fn what_cannot_be_compared_is_drawn_evenly() {
        for costs in [[3.0, 3.0], [f64::INFINITY, 1.0], [f64::MAX, -f64::MAX]] {
            let counts = counts(2, |random| softmax(&costs, 1.0, random).unwrap());
            assert!(
                counts.iter().all(|count| *count > 4500),
                "{costs:?} {counts:?}"
            );
        }
        let mut random = Random::with_seed(0);
        assert_eq!(softmax(&[], 1.0, &mut random), None);
        assert_eq!(softmax(&[], 0.0, &mut random), None);
        assert_eq!(softmax(&[2.0, 1.0], 0.0, &mut random), Some(1));
    }
}
