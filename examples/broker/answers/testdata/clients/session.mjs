// Usage: node CLIENT.mjs PACKAGE TOPIC N ADDRESS...
//
// Sends records 0 to N-1, one by one, to the broker at each address, and prints a
// line of JSON for each record.
const [name, topic, n, ...addresses] = process.argv.slice(2)

// client is the package to test.
export const client = await import(name)

// run has a session with each broker. connect returns a function that sends a
// record to partition 0 of the topic, and one that ends the session.
export async function run (connect) {
  await Promise.all(addresses.map(async address => {
    const { send, close } = await connect(address, topic)
    for (let i = 0; i < Number(n); i++) {
      const record = String(i)
      let error
      await send(record).catch(err => { error = String(err.message) })
      console.log(JSON.stringify({ address, record, error }))
    }
    await close()
  }))
}
