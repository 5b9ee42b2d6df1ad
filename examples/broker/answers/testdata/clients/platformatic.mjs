import { client, run } from './session.mjs'

// Version 2 asks for Node 22. This is all that its producer misses in Node 20.
Promise.withResolvers ??= () => {
  let resolve, reject
  const promise = new Promise((...functions) => { [resolve, reject] = functions })
  return { promise, resolve, reject }
}

const { Producer, ProduceAcks, stringSerializers } = client

await run(async (address, topic) => {
  const producer = new Producer({
    clientId: 'test',
    bootstrapBrokers: [address],
    serializers: stringSerializers,
    idempotent: true,
    acks: ProduceAcks.ALL,
    autocreateTopics: true,
    retryDelay: 10
  })
  return {
    send: value => producer.send({ messages: [{ topic, partition: 0, value }] }),
    close: () => producer.close()
  }
})
