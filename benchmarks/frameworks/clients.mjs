// Clients in JavaScript, as clients.py: `node clients.mjs NAME other PACKAGE ...` in the folder of node_modules.
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const require = createRequire(`${process.cwd()}/`)
const load = async (name) => import(pathToFileURL(require.resolve(name)))
const CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
const PLAIN = 'SAY<<hello>>'
const TOOLS = `SAY<<so ${CALL}>>`
const WORDS = { plain: 'hello', stream: 'hello', tools: 'it is 3' }
const schema = { type: 'object', properties: { a: { type: 'integer' }, b: { type: 'integer' } } }
const user = (content) => [{ role: 'user', content }]
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, ANTHROPIC_BASE_URL } = process.env

async function openai_node () {
  const { default: OpenAI } = await load('openai')
  const chat = new OpenAI().chat.completions
  const add = { type: 'function', function: { name: 'add', parameters: schema, parse: JSON.parse, function: () => 'SAY<<it is 3>>' } }
  return {
    write: '`new OpenAI({baseURL, apiKey})`; `runTools` too',
    plain: async () => (await chat.create({ model: 'policy', messages: user(PLAIN) })).choices[0].message.content,
    stream: async () => {
      let text = ''
      for await (const chunk of await chat.create({ model: 'policy', messages: user(PLAIN), stream: true })) text += chunk.choices[0].delta.content ?? ''
      return text
    },
    tools: () => chat.runTools({ model: 'policy', messages: user(TOOLS), tools: [add] }).finalContent()
  }
}

async function anthropic_node () {
  const { default: Anthropic } = await load('@anthropic-ai/sdk')
  const client = new Anthropic({ baseURL: ANTHROPIC_BASE_URL })
  const asked = { model: 'policy', max_tokens: 200 }
  const add = { name: 'add', description: 'Add.', input_schema: schema, run: () => 'SAY<<it is 3>>', parse: (input) => input }
  return {
    write: '`new Anthropic({baseURL, apiKey})`; `toolRunner` too',
    plain: async () => (await client.messages.create({ ...asked, messages: user(PLAIN) })).content[0].text,
    stream: () => client.messages.stream({ ...asked, messages: user(PLAIN) }).finalText(),
    tools: async () => (await client.beta.messages.toolRunner({ ...asked, messages: user(TOOLS), tools: [add] })).content[0].text
  }
}

async function ai (write, choose, providerOptions) {
  const { generateText, streamText, tool, jsonSchema, stepCountIs } = await load('ai')
  const { createOpenAI } = await load('@ai-sdk/openai')
  const model = choose(createOpenAI({ baseURL, apiKey }))
  const add = tool({ description: 'Add.', inputSchema: jsonSchema(schema), execute: async () => 'SAY<<it is 3>>' })
  return {
    write,
    plain: async () => (await generateText({ model, prompt: PLAIN, providerOptions })).text,
    stream: async () => streamText({ model, prompt: PLAIN, providerOptions }).text,
    tools: async () => (await generateText({ model, prompt: TOOLS, tools: { add }, stopWhen: stepCountIs(3), providerOptions })).text
  }
}

const CLIENTS = {
  openai_node,
  anthropic_node,
  ai_chat: () => ai("`createOpenAI({baseURL, apiKey}).chat('policy')`", (provider) => provider.chat('policy')),
  ai_responses: () => ai("`createOpenAI({baseURL, apiKey})('policy')` with `providerOptions: {openai: {store: false}}`",
    (provider) => provider('policy'), { openai: { store: false } })
}

const [, , name, , ...packages] = process.argv
const { write, ...checks } = await CLIENTS[name]()
const versions = Object.fromEntries(packages.map((one) => [one, JSON.parse(readFileSync(`node_modules/${one}/package.json`)).version]))
const result = { write, versions }
for (const [check, run] of Object.entries(checks)) {
  try {
    const answer = String(await run())
    result[check] = answer.includes(WORDS[check]) ? 'ok' : `answered ${answer.slice(0, 200)}`
  } catch (error) {
    result[check] = `${error.name}: ${error.message}`.slice(0, 300)
  }
}
console.log(JSON.stringify(result))
process.exit(0)
