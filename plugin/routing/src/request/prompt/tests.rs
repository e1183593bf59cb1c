mod properties;

use super::*;

pub(super) const PLAIN: Identity<'static> = Identity {
    model: "m",
    adapter: None,
    cache_salt: None,
    token_data: None,
    block_tokens: 1,
    run_length: RunLength::Even,
};

pub(super) fn read_as(generation: Generation, body: &str, identity: &Identity<'_>) -> Prompt {
    let request = Request::parse(generation, body.as_bytes())
        .unwrap_or_else(|refusal| panic!("{body}: {refusal}"));
    read(&request, identity)
}

/// A body with the given members, beside the model.
pub(super) fn body(members: &str) -> String {
    format!(r#"{{"model":"m",{members}}}"#)
}

fn chat(members: &str) -> Prompt {
    read_as(Generation::Chat, &body(members), &PLAIN)
}

fn completion(prompt: &str) -> Prompt {
    let body = body(&format!(r#""prompt":{prompt}"#));
    read_as(Generation::Completions, &body, &PLAIN)
}

fn responses(members: &str) -> Prompt {
    read_as(Generation::Responses, &body(members), &PLAIN)
}

/// A conversation with a further message at its end, so that everything to be compared lies in full blocks.
fn talk(messages: &str) -> Prompt {
    let end = r#"{"role":"user","content":"and so on"}"#;
    chat(&format!(r#""messages":[{messages},{end}]"#))
}

/// One message with the given content.
fn content(content: &str) -> Prompt {
    talk(&format!(r#"{{"role":"user","content":{content}}}"#))
}

/// Number of leading blocks that two prompts share.
fn shared(left: &Prompt, right: &Prompt) -> usize {
    if left.blocks.scope != right.blocks.scope {
        return 0;
    }
    let pairs = left.blocks.sequence.iter().zip(&right.blocks.sequence);
    pairs.take_while(|(left, right)| left == right).count()
}

fn all_same(of: impl Fn(&str) -> Prompt, spellings: &[&str]) {
    let first = of(spellings[0]);
    for spelling in spellings {
        assert_eq!(of(spelling), first, "{spelling} and {}", spellings[0]);
    }
}

fn all_different(of: impl Fn(&str) -> Prompt, prompts: &[&str]) {
    for (index, left) in prompts.iter().enumerate() {
        for right in &prompts[index + 1..] {
            assert_ne!(of(left).blocks, of(right).blocks, "{left} and {right}");
        }
    }
}

#[test]
fn spellings_of_one_content_are_one_prompt() {
    for spellings in [
        &[
            r#""hi""#,
            r#""\u0068i""#,
            r#"[{"type":"text","text":"hi"}]"#,
            r#" [ { "text" : "hi" , "type" : "text" } ] "#,
            r#"[{"type":"input_text","text":"hi"}]"#,
            r#"[{"type":"output_text","text":"hi","annotations":[]}]"#,
            r#"[{"text":"hi"}]"#,
            r#"["hi"]"#,
            r#"["", {"type":"text","text":"\u0068\u0069"}]"#,
        ][..],
        &[
            r#""é/\"\\""#,
            r#""\u00e9\/\u0022\u005c""#,
            r#""\u00E9/\"\\""#,
        ],
        &["\"\u{1f600}\"", r#""\ud83d\ude00""#, r#""\uD83D\uDE00""#],
        &[
            r#""\n\t\r\b\f""#,
            r#""\u000a\u0009\u000d\u0008\u000c""#,
            r#""\u000A\u0009\u000D\u0008\u000C""#,
        ],
        &[
            "null",
            r#""""#,
            "[]",
            r#"[""]"#,
            r#"[{"type":"text","text":""}]"#,
        ],
        &[
            r#"[{"type":"image_url","image_url":{"url":"http://a/b"}}]"#,
            r#"[{"type":"image_url","image_url":{"url":"http:\/\/a\/b"}}]"#,
            r#"[{"image_url":"http://a/b"}]"#,
            r#"[{"image_url":"http://a/b","type":"input_image"}]"#,
        ],
        &[
            r#"["h","i"]"#,
            r#"[{"type":"text","text":"h"},{"type":"text","text":"i"}]"#,
        ],
        &[
            r#"[{"type":"x","y":[1, 2]}]"#,
            r#"[ {"type" : "x", "y":[1,2]} ]"#,
        ],
    ] {
        all_same(content, spellings);
    }
}

#[test]
fn different_contents_are_different_prompts() {
    all_different(
        content,
        &[
            r#""hi""#,
            r#""h""#,
            r#""hi ""#,
            r#""\\u0068i""#,
            r#"["h","i"]"#,
            r#"[{"type":"x","text":"hi"}]"#,
            r#"[{"type":"text","txt":"hi"}]"#,
            r#"{"type":"x"}"#,
            "null",
            "1",
            "true",
            r#""\ud83d""#,
            r#""\ude00""#,
            r#""\ud83d\ud83d""#,
            r#""\ud83d\u0041""#,
            r#"[["hi"]]"#,
            r#"[1,2]"#,
            r#"[12]"#,
        ],
    );
}

#[test]
fn a_half_character_takes_nothing_with_it() {
    let ends = |text: &str| completion(text).tokens;
    assert_eq!(ends(r#""\ud83dabcde""#), 2);
    assert_eq!(ends(r#""\ud83d\u0061bcde""#), 2);
    assert_eq!(ends(r#""\ud83d\ude00""#), 1);
    assert_eq!(ends(r#""\ud83d\ud83d\ude00""#), 2);
}

#[test]
fn the_order_of_a_messages_members_and_white_space_do_not_matter() {
    all_same(
        talk,
        &[
            r#"{"role":"tool","content":"7","tool_call_id":"c1","name":"f","x":[1,{"y":"z"}]}"#,
            r#"{"x":[1,{"y":"z"}],"name":"f","tool_call_id":"c1","content":"7","role":"tool"}"#,
            "{ \"tool_call_id\" : \"c1\",\n\"x\": [ 1 , { \"y\" :\t\"z\" } ] ,\r\"role\":\"tool\",\"name\":\"f\",\"content\":\"7\" }",
            r#"{"role":"tool","content":"7","tool_call_id":"c1","name":"f","x":[1,{"y":"\u007a"}],"refusal":null}"#,
        ],
    );
}

#[test]
fn every_member_of_a_message_counts() {
    all_different(
        talk,
        &[
            r#"{"role":"tool","content":"7"}"#,
            r#"{"role":"user","content":"7"}"#,
            r#"{"content":"7"}"#,
            r#"{"role":"tool","content":"7","name":"f"}"#,
            r#"{"role":"tool","content":"7","name":"g"}"#,
            r#"{"role":"tool","content":"7","tool_call_id":"f"}"#,
            r#"{"role":"tool","content":"7","reasoning_content":"f"}"#,
            r#"{"role":"tool","content":"7","other":"f"}"#,
            r#"{"role":"tool","content":"7","other":{"f":1}}"#,
            r#"{"role":"tool","content":"7","other":"{f:1}"}"#,
        ],
    );
}

#[test]
fn of_duplicated_members_the_last_one_counts() {
    all_same(
        talk,
        &[
            r#"{"role":"user","content":"hi"}"#,
            r#"{"content":"no","role":"system","content":"hi","role":"user"}"#,
            r#"{"content":"no","role":"user","c\u006fntent":"hi"}"#,
        ],
    );
    all_same(
        content,
        &[
            r#"[{"type":"text","text":"hi"}]"#,
            r#"[{"type":"image_url","text":"no","text":"hi","type":"text"}]"#,
        ],
    );
    all_same(
        talk,
        &[
            r#"{"role":"user","content":null}"#,
            r#"{"role":"user","content":"hi","content":null}"#,
        ],
    );
}

#[test]
fn borders_of_messages_matter() {
    all_different(
        talk,
        &[
            r#"{"role":"user","content":"ab"},{"role":"user","content":"c"}"#,
            r#"{"role":"user","content":"a"},{"role":"user","content":"bc"}"#,
            r#"{"role":"user","content":"abc"}"#,
            r#"{"role":"user","content":"ab"},{"role":"assistant","content":"c"}"#,
            r#"{"role":"user","content":"ab"},{"role":"user"},{"role":"user","content":"c"}"#,
            r#"{"role":"userab"},{"role":"user","content":"c"}"#,
        ],
    );
}

#[test]
fn calls_count_by_name_and_arguments_not_by_id() {
    let calls = |calls: &str| {
        talk(&format!(
            r#"{{"role":"assistant","content":null,"tool_calls":{calls}}}"#
        ))
    };
    all_same(
        calls,
        &[
            r#"[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]"#,
            r#"[{"type":"function","function":{"arguments":"{\"x\":1}","name":"f"},"id":"2"}]"#,
            r#"[ {"index":0, "function":{"arguments":"{\u0022x\":1}","name":"f"}} ]"#,
        ],
    );
    all_different(
        calls,
        &[
            r#"[{"function":{"name":"f","arguments":"{\"x\":1}"}}]"#,
            r#"[{"function":{"name":"g","arguments":"{\"x\":1}"}}]"#,
            r#"[{"function":{"name":"f","arguments":"{\"x\":2}"}}]"#,
            r#"[{"function":{"name":"f","arguments":{"x":1}}}]"#,
            r#"[{"function":{"name":"f"}}]"#,
            r#"[{"function":{"name":"f"}},{"function":{"name":"f"}}]"#,
            r#"[{"custom":{"name":"f"}}]"#,
            r#"["f"]"#,
            r#""f""#,
            "[]",
        ],
    );
    let none = talk(r#"{"role":"assistant"}"#);
    assert_eq!(calls("null"), none);
    assert_eq!(calls("[ ]"), none);
    let old = |call: &str| talk(&format!(r#"{{"role":"assistant","function_call":{call}}}"#));
    all_same(
        old,
        &[
            r#"{"name":"f","arguments":"1"}"#,
            r#"{"arguments":"1","name":"f"}"#,
        ],
    );
    all_different(
        old,
        &[r#"{"name":"f","arguments":"1"}"#, r#"{"name":"f"}"#, "null"],
    );
}

#[test]
fn tools_come_first() {
    let long = "x".repeat(100);
    let with = |tools: &str| {
        chat(&format!(
            r#"{tools}"messages":[{{"role":"user","content":"{long}"}}]"#
        ))
    };
    let none = with("");
    for nothing in [
        r#""tools":null,"#,
        r#""tools":[ ],"#,
        r#""functions":[],"#,
        r#""tool_choice":"auto","#,
    ] {
        assert_eq!(with(nothing), none, "{nothing}");
    }
    let one = with(r#""tools":[{"type":"function","function":{"name":"f"}}],"#);
    assert_eq!(shared(&one, &none), 0);
    assert_eq!(
        with(r#""tools":[ {"type":"function", "function":{"name":"\u0066"}} ],"#),
        one
    );
    let old = with(r#""functions":[{"name":"f"}],"#);
    assert_eq!(shared(&old, &none), 0);
    assert_eq!(shared(&old, &one), 0);
    // The shared blocks lie within the first tool: none of them are from the messages.
    let two = with(
        r#""tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}],"#,
    );
    assert!(shared(&two, &one) < one.blocks.sequence.len() - long.len() / 4);
    let before = chat(&format!(
        r#""messages":[{{"role":"user","content":"{long}"}}],"tools":[{{"type":"function","function":{{"name":"f"}}}}]"#
    ));
    assert_eq!(before, one);
}

#[test]
fn a_medium_takes_a_fixed_room_and_counts_by_its_data() {
    let long = "A/b+".repeat(20_000);
    let image = |url: &str| {
        content(&format!(
            r#"[{{"type":"image_url","image_url":{{"url":"{url}"}}}}]"#
        ))
    };
    let short = image("http://a/b.png");
    let data = image(&format!("data:image/png;base64,{long}"));
    assert_eq!(data.tokens, short.tokens);
    assert_eq!(data.blocks.sequence.len(), short.blocks.sequence.len());
    assert_ne!(data, short);
    assert_ne!(data, image(&format!("data:image/png;base64,{long}A")));
    let escaped = long.replace('/', "\\/");
    assert_eq!(data, image(&format!("data:image\\/png;base64,{escaped}")));

    let nothing = content("[]").tokens;
    assert!((nothing + MEDIA_TOKENS..=nothing + MEDIA_TOKENS + 1).contains(&short.tokens));

    all_different(
        content,
        &[
            r#"[{"type":"image_url","image_url":{"url":"a"}}]"#,
            r#"[{"type":"image_url","image_url":{"url":"b"}}]"#,
            r#"[{"type":"image_url","image_url":{"url":"a","detail":"low"}}]"#,
            r#"[{"type":"image_url","image_url":{"url":"a"}},{"type":"image_url","image_url":{"url":"a"}}]"#,
            r#"[{"type":"input_image","file_id":"a"}]"#,
            r#"[{"type":"input_audio","input_audio":{"data":"a","format":"wav"}}]"#,
            r#"[{"type":"input_audio","input_audio":{"data":"b","format":"wav"}}]"#,
            r#"[{"type":"image_url","image_url":{"url":"a"}},"text"]"#,
            r#"["text",{"type":"image_url","image_url":{"url":"a"}}]"#,
        ],
    );
}

#[test]
fn what_stands_before_an_image_stays_shared() {
    let ask = |url: &str| {
        content(&format!(
            r#"[{{"type":"text","text":"{}"}},{{"type":"image_url","image_url":{{"url":"{url}"}}}}]"#,
            "x".repeat(400)
        ))
    };
    assert!((100..104).contains(&shared(&ask("a"), &ask("b"))));
}

#[test]
fn ids_are_known_in_all_their_shapes() {
    let ids: Vec<u32> = (1..=12).collect();
    let by_four = Identity {
        block_tokens: 4,
        ..PLAIN
    };
    let golden = [
        14643705804678351452,
        4945711292740353085,
        12583592247330656132,
    ];
    for prompt in [
        "[1,2,3,4,5,6,7,8,9,10,11,12]",
        "[ 1, 2,3 ,4,5,6,7,8,9,10,11,\n12 ]",
        "[[1,2,3,4,5,6,7,8,9,10,11,12]]",
    ] {
        let body = body(&format!(r#""prompt":{prompt}"#));
        let read = read_as(Generation::Completions, &body, &by_four);
        assert_eq!((read.tokens, &read.blocks.sequence[..]), (12, &golden[..]));
        let given = Identity {
            token_data: Some(&ids),
            ..by_four
        };
        for (generation, members) in [
            (Generation::Chat, r#""messages":[]"#),
            (Generation::Completions, r#""prompt":"text""#),
            (Generation::Responses, r#""input":"text""#),
        ] {
            let body = self::body(members);
            assert_eq!(read_as(generation, &body, &given), read);
        }
    }
    let given = Identity {
        token_data: Some(&[]),
        ..PLAIN
    };
    let body = body(r#""prompt":"text""#);
    assert_eq!(
        read_as(Generation::Completions, &body, &given),
        completion("\"text\"")
    );
}

#[test]
fn what_is_no_list_of_ids_is_taken_as_it_is_written() {
    let by_ids = completion("[1]").blocks.scope;
    for prompt in ["[]", "[0]", "[4294967295]", "[[],[1]]"] {
        assert_eq!(completion(prompt).blocks.scope, by_ids, "{prompt}");
    }
    let not_ids = [
        "[4294967296]",
        "[99999999999999999999999999]",
        "[-1]",
        "[1.0]",
        "[1e3]",
        "[1,null]",
        "[1,\"a\"]",
        "[[1],\"a\"]",
        "[[[1]]]",
        "[{}]",
        "[\"1\"]",
        "\"1\"",
    ];
    for prompt in not_ids {
        assert_ne!(completion(prompt).blocks.scope, by_ids, "{prompt}");
    }
}

#[test]
fn a_batch_is_one_prompt_after_the_other() {
    let one = completion(r#""some text that is long""#);
    assert_eq!(completion(r#"["some text that is long"]"#), one);
    let two = completion(r#"["some text that is long","more"]"#);
    assert!(two.blocks.sequence.starts_with(&one.blocks.sequence));
    all_different(
        completion,
        &[
            r#"["abcd","efghijkl"]"#,
            r#"["abcdefgh","ijkl"]"#,
            r#"["abcdefghijkl"]"#,
            "[[1,2],[3,4]]",
            "[[1],[2,3,4]]",
            "[1,2,3,4]",
        ],
    );
    assert_eq!(completion("[[1,2],[3]]").tokens, 3);
}

#[test]
fn a_longer_text_keeps_the_blocks_of_a_shorter_one() {
    let short = completion(r#""0123456789""#);
    assert_eq!((short.tokens, short.blocks.sequence.len()), (3, 2));
    assert_eq!(shared(&short, &completion(r#""0123456789abcdef""#)), 2);
    assert_eq!(completion("\"\"").tokens, 1);
}

#[test]
fn responses_take_a_string_or_items() {
    all_same(
        responses,
        &[
            r#""input":"hello there""#,
            r#""input":[{"role":"user","content":"hello there"}]"#,
            r#""input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hello there"}]}]"#,
            r#""instructions":null,"tools":[],"input":"hello there""#,
        ],
    );
    all_different(
        responses,
        &[
            r#""input":"hello there""#,
            r#""instructions":"be brief","input":"hello there""#,
            r#""instructions":"be polite","input":"hello there""#,
            r#""tools":[{"name":"f"}],"input":"hello there""#,
            r#""input":[{"role":"user","content":"hello there"},{"type":"function_call","name":"f","arguments":"1111"}]"#,
            r#""input":[{"role":"user","content":"hello there"},{"type":"function_call","name":"f","arguments":"2222"}]"#,
            r#""input":[{"role":"user","content":"hello there"},{"type":"function_call_output","call_id":"f","output":"2222"}]"#,
        ],
    );
    let turn = responses(r#""instructions":"be brief","input":"hello there""#);
    let next = responses(
        r#""instructions":"be brief","input":[{"role":"user","content":"hello there"},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"hi"}]}]"#,
    );
    assert!(next.blocks.sequence.starts_with(&turn.blocks.sequence));
}

#[test]
fn generate_is_known_as_a_completion_is() {
    let generate = |members: &str| read_as(Generation::Generate, &body(members), &PLAIN);
    for prompt in [r#""some text""#, r#"["some","text"]"#] {
        let text = generate(&format!(r#""text":{prompt}"#));
        assert_eq!(text, completion(prompt), "{prompt}");
        assert_ne!(text.blocks, Blocks::default());
    }
    for ids in ["[1,2,3]", "[[1,2],[3]]"] {
        assert_eq!(generate(&format!(r#""input_ids":{ids}"#)), completion(ids));
    }
    let seen = |data: &str| generate(&format!(r#""text":"look: <image>","image_data":{data}"#));
    assert_eq!(seen("null"), completion(r#""look: <image>""#));
    assert_eq!(seen(r#""a.png""#), seen(r#"["a.png"]"#));
    all_different(
        seen,
        &["null", r#""a.png""#, r#""b.png""#, r#"["a.png","b.png"]"#],
    );
}

#[test]
fn a_path_that_is_not_known_has_no_blocks() {
    let body = body(r#""messages":[{"role":"user","content":"hello"}],"text":"hello""#);
    let read = read_as(Generation::Other, &body, &PLAIN);
    assert_eq!(read.blocks, Blocks::default());
    assert_eq!(read.tokens, (body.len() as u64).div_ceil(4));
}

#[test]
fn models_adapters_and_salts_share_nothing() {
    let identities = [
        PLAIN,
        Identity {
            model: "n",
            ..PLAIN
        },
        Identity {
            adapter: Some("a"),
            ..PLAIN
        },
        Identity {
            cache_salt: Some(b"a"),
            ..PLAIN
        },
        Identity {
            cache_salt: Some(b"b"),
            ..PLAIN
        },
    ];
    let same = body(r#""messages":[{"role":"user","content":"hello there"}]"#);
    let prompts = [
        (Generation::Chat, same.as_str()),
        (
            Generation::Completions,
            r#"{"model":"m","prompt":[1,2,3,4]}"#,
        ),
        (
            Generation::Completions,
            r#"{"model":"m","prompt":"hello there"}"#,
        ),
    ];
    for (generation, body) in prompts {
        let read: Vec<Prompt> = identities
            .iter()
            .map(|identity| read_as(generation, body, identity))
            .collect();
        for (index, left) in read.iter().enumerate() {
            assert!(left.blocks.count() >= 2);
            for right in &read[index + 1..] {
                assert_eq!(shared(left, right), 0);
            }
        }
    }
}

#[test]
fn the_bodys_salt_wins_and_an_empty_one_says_nothing() {
    let salted = Identity {
        cache_salt: Some(b"header"),
        ..PLAIN
    };
    let read = |members: &str, identity: &Identity<'_>| {
        let ids = body(&format!(r#"{members}"prompt":[1,2,3]"#));
        let text = body(&format!(r#"{members}"prompt":"hello there""#));
        (
            read_as(Generation::Completions, &ids, identity),
            read_as(Generation::Completions, &text, identity),
        )
    };
    let said = |salt: &'static [u8]| Identity {
        cache_salt: Some(salt),
        ..PLAIN
    };
    for (members, expected) in [
        ("", said(b"header")),
        (r#""cache_salt":"own","#, said(b"own")),
        (r#""cache_salt":"\u006fwn","#, said(b"own")),
        (r#""nvext":{"cache_salt":"nv"},"#, said(b"nv")),
        (
            r#""nvext":{"cache_salt":"nv"},"cache_salt":"own","#,
            said(b"own"),
        ),
        (
            r#""nvext":{"cache_salt":"nv"},"cache_salt":"","#,
            said(b"nv"),
        ),
        (
            r#""nvext":{"cache_salt":null},"cache_salt":null,"#,
            said(b"header"),
        ),
        (r#""nvext":3,"cache_salt":7,"#, said(b"7")),
    ] {
        assert_eq!(read(members, &salted), read("", &expected), "{members}");
    }
}

#[test]
fn very_many_members_are_taken_as_they_are_written() {
    let many = |last: &str| {
        let members: Vec<String> = (0..1000).map(|n| format!(r#""{n}":{n}"#)).collect();
        format!(
            r#"{{"role":"user",{},"content":"{last}"}}"#,
            members.join(",")
        )
    };
    all_different(talk, &[&many("a"), &many("b")]);
    all_different(content, &[&format!("[{}]", many("a")), &many("b")]);
}

#[test]
fn deep_nesting_is_no_danger() {
    let lists = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let objects =
        |depth: usize| format!("{}1{}", "{\"function\":".repeat(depth), "}".repeat(depth));
    // The walk needs no stack; real bodies that deep are refused anyway.
    for hostile in [lists(100_000), objects(100_000)] {
        let mut hash = Xxh3Default::new();
        canonical::value(&hostile, &mut hash);
        elements(&hostile, |_| {});
        let _ = members(&hostile, &[]);
    }
    let (deep, object) = (lists(120), objects(120));
    for hostile in [&deep, &object] {
        content(hostile);
        talk(&format!(r#"{{"tool_calls":[{hostile}]}}"#));
        talk(&format!(r#"{{"function_call":{hostile}}}"#));
        content(&format!(
            r#"[{{"type":"image_url","image_url":{hostile}}}]"#
        ));
        completion(&format!("[{hostile}]"));
        responses(&format!(r#""input":[{hostile}]"#));
        chat(&format!(r#""messages":[],"tools":{hostile}"#));
    }
}
